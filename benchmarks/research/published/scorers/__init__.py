"""One module for each kind of answer. A scorer is a function of a task's questions and of somebody's predictions."""
