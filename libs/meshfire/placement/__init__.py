"""Where experts live: the placement document and how a new one is made. Pure; knows no wire and no clock."""
