"""What tokens cost: prices, the neurons of a request, comparisons of models. Pure."""
