"""Where the console script begins: it imports nothing, so that Ctrl-C during the imports is as quiet as later on."""


def main() -> None:
    try:
        from cluster.cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
