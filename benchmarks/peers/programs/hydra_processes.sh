optuna create-study --skip-if-exists --storage sqlite:///optuna.db --study-name peers --direction maximize
for process in 1 2 3 4; do
    python -m benchmarks.peers.programs.hydra_app --multirun --config-name hydra_processes hydra.sweep.dir=multirun/$process &
done
wait
