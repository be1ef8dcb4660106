"""Training runs of strop and TRL in separate processes, which ``against_trl.py`` alternates.

The modules ``trl_*`` run in TRL's virtual environments, where strop is not installed; ``setting`` and
``record`` run in all of them.
"""
