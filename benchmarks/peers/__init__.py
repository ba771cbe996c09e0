"""The peers: one adapter class each. They are imported only in the process that measures them."""
