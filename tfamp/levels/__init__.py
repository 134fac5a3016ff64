"""`prepare` and what it is made of: what a level means, and how a model that exists gets it."""
