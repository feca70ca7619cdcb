"""Answers in Python, without a server: where each input left the network.

Run: python examples/predict.py [a directory that isobatch prepare wrote, and inputs]
"""

import sys

from isobatch import load
from isobatch.deployments.demo import A_DIGIT, demo_directory

if __name__ == "__main__":
    directory, *inputs = sys.argv[1:] or [demo_directory()]
    network = load(directory)
    for answer in network.predict(inputs or [A_DIGIT]):
        print(
            f"{answer.name}: {answer.score:.3f}, after block {answer.exit_block} (the last is {network.num_blocks - 1})"
        )
