"""Tokens out to shards, sums back: which rows go to which shard, how partial sums become one. Pure; knows no wire."""
