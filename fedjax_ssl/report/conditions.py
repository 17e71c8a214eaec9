"""The conditions of a run's clients, in words: unknown images, attacks, failures, compression, privacy."""

import numpy as np

from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.records.words import is_private, num_byzantine, unknown_images


def conditions(run: RunRecords) -> list[str]:
    """A sentence for each condition that differs from the default."""
    config, last = run.config, run.metrics[-1]
    attack, availability, privacy = config["attack"], config["availability"], config["privacy"]
    found = list(filter(None, [unknown_images(config)]))
    if attack["kind"] != "none":
        sent = f"{int(np.nansum(run.values('byzantine_uploads'))):,} of {int(run.values('uploads').sum()):,} uploads"
        who = f"{num_byzantine(config)} of {config['num_clients']} clients"
        found.append(f"{who} attack (attack.kind {attack['kind']}), with {sent}")
    if config["aggregation"]["mean"] != "mean":
        found.append(f"the mean of uploads is {config['aggregation']['mean']}")
    if availability["never"]:
        found.append(f"{100 * availability['never']:.4g} % of each cohort do not answer")
    if availability["late"]:
        weight = availability["late_weight"]
        fate = f"count {weight:.4g} times" if weight else "are dropped"
        found.append(f"{100 * availability['late']:.4g} % of the uploads are a round late, and {fate}")
    if config["compression"]["kind"] != "none":
        kind = config["compression"]["kind"]
        kept = f" of {100 * config['compression']['share']:.4g} %" if kind == "top_k" else ""
        found.append(f"uploads are compressed: {kind}{kept}")
    if config["personal_parts"]:
        found.append(
            f"each client keeps its own {' and '.join(config['personal_parts'])}; the global model, whose accuracy on "
            "the test set is shown, has the server's"
        )
    if privacy["noise"]:
        text = f"noise of {privacy['noise']:.4g} times the clipping norm, in {privacy['cohorts']} cohorts"
        if "epsilon" in last:
            text += f": clients have ({last['epsilon']:.3g}, {privacy['delta']:.1g})-differential privacy"
            text += (
                " by this run alone; the guarantees of further runs on the same clients add up"
                if is_private(config)
                else " only if nobody knows the seed, from which the noise follows (privacy.reproducible)"
            )
        found.append(text)
    return [sentence[0].upper() + sentence[1:] + "." for sentence in found]
