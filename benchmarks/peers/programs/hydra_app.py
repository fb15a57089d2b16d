import hydra

from benchmarks.peers.table import run_trial


@hydra.main(version_base=None, config_path=".", config_name="hydra_config")
def main(config):
    return run_trial(config.a, config.b)


if __name__ == "__main__":
    main()
