"""Scripts that make environments and models; nothing of the package imports them."""
