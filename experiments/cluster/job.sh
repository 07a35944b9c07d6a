# Read by the batch scripts. `job COMMAND` runs it once on each node and waits;
# `run FLAGS` so trains. A run that was stopped by a signal is put into the queue
# again. PYTHON names the interpreter, RUNS how often a job may start (SLURM
# counts the restarts).

job() {
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "${RUNS:-50}" ]; then
    echo "restarted $SLURM_RESTART_COUNT times; not again" >&2
    return 1
  fi
  # srun does not inherit --cpus-per-task (SLURM 22.05 and newer).
  export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
  # --kill-on-bad-exit: a process that fails ends the step. The others save or
  # end by themselves before; --wait gives them the time.
  status=0
  srun --kill-on-bad-exit=0 --wait=120 "$@" || status=$?
  if [ "$status" -eq 143 ]; then
    echo "stopped by a signal; into the queue again"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$status"
}

run() {
  job "${PYTHON:-.venv/bin/python}" -m searchrl_jax.train "$@"
}
