"""`remat-kit policies`: the table of policies."""

import json

from rich.table import Table

from remat_kit.cli import _input, _output


def command(json_file: _input.JsonOption = None, force: _input.ForceOption = False) -> None:
    """List the policies, with the tensors that each keeps or moves to the host."""
    _output.check(json_file, force)
    from remat_kit._policy import POLICIES

    data = [
        {
            "name": policy.name,
            "summary": policy.summary,
            "wraps": policy.region.value,
            "saves": list(policy.saves),
            "offloads": list(policy.offloads),
            "kernels": list(policy.kernels),
            "otherwise": policy.rule.value,
        }
        for policy in POLICIES.values()
    ]
    if json_file:
        _output.write(json_file, json.dumps(data, indent=1) + "\n")
    table = Table("policy", "what it does", "saves", "offloads")
    for row in data:
        table.add_row(row["name"], row["summary"], " ".join(row["saves"] + row["kernels"]), " ".join(row["offloads"]))
    _output.show_table(table, json_file)
    _output.show(
        "Also save(NAME,...), offload(NAME,...), save_kernels(PRIMITIVE,...); and unions with |\n"
        "For stacks of blocks: segments(auto|sqrt|recursive|COUNT), first(COUNT), every(COUNT), each also with a "
        "policy inside, segments(4,selective_attention)\n",
        json_file,
    )
