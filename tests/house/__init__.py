"""The rooms of the package: a picture of them, the way of a step through them, and what CONTRIBUTING says of them."""
