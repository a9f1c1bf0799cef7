"""The `processes` placement: server, trainer and orchestrator as three local processes, each restartable alone.

    paceline train            starts the three, and restarts any that dies
      |- server               `paceline serve` on a loopback port, behind a key made for this run
      |- trainer              answers over a socket in a private folder
      `- orchestrator         the same loop as everywhere; asks the other two

Weights travel as a file in the run directory, adapters in the request.

    the server dies           its requests wait, it comes back and is given the current weights
    the trainer dies          the orchestrator takes the run back to its newest checkpoint
    the orchestrator dies     it comes back and resumes from the newest checkpoint; the other two stay warm
    `paceline train` dies     the three end too; --resume latest goes on
"""
