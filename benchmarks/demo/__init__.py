"""The demo world and the demo model: a small, complete testbed for adapting a frozen multimodal model.

World
    Pictures of 48 x 48 pixels. Scenes hold one to five shapes (four shapes, six colours, two sizes) on a 3 x 3 grid
    (`scenes`); scikit-learn's handwritten digits are a second domain, of real images, never trained on (`streams`).
    An example's content decides its split, so train, validation and test share no picture, no arrangement of objects
    and no digit image, and the model is trained on train content only. Everything follows from seeds.

Base families (`questions`), trained, in several phrasings and instructed formats (one word, a sentence, a letter of
three options, a number, yes or no)
    colour, shape, size, position, count, presence, comparison; copy says any word of the vocabulary, so that every word
    is an output the model can give; rename gives two values new names within the question.

Stream tasks (`streams`), never trained, with the untouched model's accuracy on each
    field       0.000  new answer format for known content
    guild       0.000  new answer vocabulary for known content
    beside      0.059  new composition: the colour of a neighbour
    count_pair  0.543  new composition: counting by two attributes
    variety     0.141  new question type: how many different values
    digit       0.086  new visual domain: handwritten digits
    code_shape  0.000  shares its question with code_digit; the code of the colour
    code_digit  0.000  shares its question with code_shape; the code of the parity

Search tasks (`search_streams`), never trained or reported: settings are searched on them

Model (`model`)
    LLaVA: a CLIP vision tower (3 layers, width 192, 36 image tokens) and a Qwen3 text model (5 layers, width 256, 4
    query and 2 key-value heads of size 64), 4.9 million parameters, context 4096, byte-level BPE of about 840 tokens.
    The checkpoint stores float16 and declares float32. vLLM's `--dtype auto` turns float32 models into bfloat16: pass
    `--dtype float32` for the figures here. Prompts beyond 192 tokens were never trained on. The image tokens hold more
    than was asked about: a linear probe on them reads over 90% of held-out digits (`tests/benchmarks`).
    Training the committed checkpoint took 31 minutes on two CPU cores that other work kept busy (600 warm-up and 2000
    main steps, resumed once).

Accuracy on held-out base questions (2700, greedy, exact match): 0.983; `benchmarks/results/demo_model.json` has more.
"""
