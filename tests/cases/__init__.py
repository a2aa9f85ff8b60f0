"""Cases from the field, at the level of the product."""
