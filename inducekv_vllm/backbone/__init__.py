"""The served model, as its files describe it: which kind it is, which bundles are of it, how large its memory is."""
