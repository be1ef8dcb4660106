"""One training run of strop or TRL in a process of its own; ``against_trl.py`` starts them in turn.

The modules ``trl_*`` run in TRL's virtual environments, where strop is not installed; ``setting`` and
``record`` run in all of them.
"""
