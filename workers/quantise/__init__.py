"""Quantising a checkpoint of floats: `baton quantize`. Token ids in, a compressed-tensors folder out."""
