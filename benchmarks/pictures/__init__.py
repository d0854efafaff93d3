"""Pictures as people have and send them: what a fact and a trained task survive, on the demo model over HTTP.

    python -m benchmarks.pictures --output benchmarks/results/pictures.json

Photographs of 12 megapixels with EXIF, screenshots, scanned forms, logos, charts (`files`). Each is taught as a fact,
and asked for as the same bytes and as chat clients make other ones of them: scaled down, JPEG of quality 85. `right`
is the share that is answered by its own fact, `wrong` by another one; `others` the share of other pictures of its kind
that are answered at all. A task is trained on photographs of the demo world, and asked in the same ways.
"""
