"""`python -m flashrnn_deploy` is the command `flashrnn-deploy`."""

from flashrnn_deploy.cli import main

if __name__ == "__main__":
    main(prog_name="python -m flashrnn_deploy")
