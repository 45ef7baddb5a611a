"""Linear layers: gradients of what several read or share, and adapters beside them."""
