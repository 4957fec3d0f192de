"""How values that are on several devices become one, and get back to all of them."""
