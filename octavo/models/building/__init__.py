"""Parts of a decoder, made from a checkpoint: packed weights, and attention of them."""
