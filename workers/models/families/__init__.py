"""One module for each model family: a spec over the decoder stack. `registry` lists them."""
