"""Continual learning: a stream of tasks, learned one after the other, and what is left of all of them.

Four parts that do not know each other, and what joins them:

    suites/     data only: the tasks in their order, and questions of what the model could do before
    methods/    what learns a task: from its examples and the state it left after the task before to a new state
    answering/  how what a method has made answers questions, and who is asked
    metrics     numbers from the accuracy matrix a[i, t]: the score on task t after learning task i
    stream      task by task: learn, answer, write down
    serving     the servers that answer;  jobs: streams in several processes;  run: all of a run;  presets/: its options

    python -m benchmarks.continual run --suite demo --method lora_replay --budget 32 --seed 0 1 2 --out DIR
"""
