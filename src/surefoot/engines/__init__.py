"""Who speaks: engines turn token ids into token ids, with the probability of every choice."""
