"""The demo world and the demo model: a small, complete testbed for adapting a frozen multimodal model.

World. Pictures of 48 x 48 pixels with one to five coloured shapes on a 3 x 3 grid (`scenes`), and scikit-learn's handwritten
digits (`streams`). Base families (`questions`), trained: colour, shape, size, position, count, presence, comparison, copy
(says any word of the vocabulary) and rename (gives values new names), in several phrasings and instructed formats. Stream
tasks (`streams`), never trained:
"""
