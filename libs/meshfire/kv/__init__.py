"""KV blocks: who holds them, how they are named, lent and moved. Pure: knows neither requests nor gRPC."""
