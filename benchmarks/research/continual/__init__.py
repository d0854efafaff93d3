"""Continual learning: a stream of tasks, learned one after the other, and the accuracy on all of them.

Four independent parts, and the modules that join them:

    suites/      data only: the tasks in their order, and base questions that the model could answer before
    methods/     what learns a task: from its examples and the previous state to a new state
    answering/   how an artifact answers questions, in this process or on a server
    metrics      scores of the accuracy matrix a[i, t]: the accuracy on task t after learning task i

    stream       task by task: learn, answer, write the results;  jobs: streams in several processes
    serving      the servers that answer
    run          methods, budgets and seeds over one stream;  presets/: its options
    results      the folder of a run, as diagnostics, the report and runs read it
    comparison   methods against each other, paired over seeds
    diagnostics/ explanations of the numbers;  report/: the page
    search       every method's settings, searched in the same way;  tuned: the file of the winners
    footprint_table    the bytes of a memory as adapter parameters and exemplars
"""
