"""Names that people know from elsewhere, or misspell: what to write instead.

One table for names of the reference, of other libraries of this field and of earlier habits. A name that is in no
table gets the nearest one that exists. Whoever adds what "does not exist yet" takes it out of here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["FOREIGN", "advice", "foreign", "suggestion"]

_CUTOFF = 0.72
"""Above difflib's 0.6, where "gpus" is near "vcpus" and "volumes" is near "roles"."""
_SHOWN = 12
"""Names that a message lists at most; where there are more, it names the help."""

_ELSEWHERE = "does not exist yet; there are sky.AWS, sky.Local, and sky.SSH for any machine that ssh reaches"
_COLLECTION = "shared collections do not exist yet; calls to pool.node(0) can keep state there by sky.once(...)"
_VOLUME = "volumes do not exist yet; read the bucket in the function, or send files by sky.Image(includes=[...])"
_DETACHED = "pools that outlive their program do not exist yet; a pool ends with its `with` block or its program"
_ELASTIC = "elastic pools do not exist yet; a pool has a fixed number of nodes: nodes=4"
_SEVERAL = "a pool of several providers does not exist yet; open one pool for each provider"
_DEVICES = 'write accelerator="A100", or accelerator=sky.accelerators.A100(count=8) for 8 on each node'
_OF_A_CALL = "what a call needs is the pool's so far: ComputePool(accelerator=..., vcpus=..., memory_gib=...)"
_OF_THE_POOL = "it is an option of the pool: sky.ComputePool(...)"
_OF_THE_IMAGE = "it is an option of the image: ComputePool(image=sky.Image(...))"
_OF_THE_PROVIDER = "it is an option of the provider: sky.AWS(region=..., instance_types=[...])"
_OF_THE_DECORATOR = "it is an option of a call: @sky.compute(retries=3, timeout_s=60)"
_DECORATE = "decorate the function: @sky.integrations.torch below @sky.compute"
_SEND = "send a call by an operator: f(x) >> pool for its value, f(x) > pool for a future"
_MAP = "write pool.map(f, xs)"
_PAIRS = "write pool.map(f, xs, ys), which takes several iterables; of pairs: pool.map(f, *zip(*pairs))"
_OPEN = "open a pool: with sky.ComputePool(provider=sky.Local()) as pool"
_LEASES = (
    "leases replace it: nodes end when the `with` block or this process ends, and never by the clock, "
    "so a ten-hour run lives and a forgotten machine dies in minutes"
)
_PROVIDERS = (
    "Azure Container CoreWeave GCP Hyperstack Kubernetes Lambda LambdaLabs Nebius OCI Paperspace RunPod Scaleway Slurm "
    "TensorDock VastAI Verda Vultr"
)
_INTEGRATIONS = "JoblibPool ScikitLearnPool accelerate jax keras lightning tensorflow torch transformers"
_COLLECTIONS = "barrier counter dict lock queue set"


def _each(names: str, text: str) -> dict[str, str]:
    return {name: text.replace("{name}", name) for name in names.split()}


FOREIGN: dict[str, dict[str, str]] = {
    "skyward": {
        **_each(_PROVIDERS, f"the provider {{name}} {_ELSEWHERE}"),
        **_each(_INTEGRATIONS, "write sky.integrations.{name}"),
        **_each(_COLLECTIONS, _COLLECTION),
        **_each("A100 H100 H200 L4 T4", "write sky.accelerators.{name}()"),
        **_each("Volume S3Volume storage Storage volumes", _VOLUME),
        **_each("Client server App Session", _DETACHED),
        **_each("function remote task delayed", f"write @sky.compute above the function, and {_SEND}"),
        **_each("init pool connect", _OPEN),
        **_each("Actor actor cls", f"remote objects do not exist yet: {_COLLECTION.partition('; ')[2]}"),
        **_each("Offer offers InstanceType", "write pool.offers(), or `skyward offers` in a shell"),
        **_each("get run submit broadcast", _SEND),
        "Compute": 'write sky.ComputePool(...); a pool of skyward.toml is sky.ComputePool.named("train")',
        "Executor": "write pool.executor()",
        "LogConfig": "write ComputePool(logs=sky.LogFiles(folder))",
        "CallbackWriter": "write ComputePool(logs=function), which is called with each line",
        "redirect_output": "write ComputePool(logs=function), which is called with each line",
        "DistributedSampler": "torch has one; without torch, sky.shard(data) gives each node its part",
        "MultiPool": "open each pool: with sky.ComputePool(...) as a, sky.ComputePool(...) as b",
        "Nodes": _ELASTIC,
        "PendingFunction": "its name is sky.PendingCompute",
        "PipIndex": 'write sky.Image(pip_extra_index_url="https://...")',
        "Spec": _SEVERAL,
        "Worker": 'write ComputePool(concurrency=4, executor="thread")',
        "main": f"call the function of your program; {_OPEN}",
        "map": _MAP,
        "metrics": "write ComputePool(on_event=function), which is called with each sky.events.NodeUsage",
        "plugins": _DECORATE,
        "sky": "the module itself is a target: `import skyward as sky`, then f(x) >> sky",
    },
    "integrations": {
        "deepspeed": "it has no integration of its own; use sky.integrations.accelerate, lightning or transformers",
        "huggingface": "write sky.integrations.transformers",
        "joblib": "write sky.integrations.JoblibPool(...) or joblib_backend(pool)",
        "pytorch": "write sky.integrations.torch",
        "scikit_learn": "write sky.integrations.ScikitLearnPool(...) or sklearn_backend(pool)",
        "sklearn": "write sky.integrations.ScikitLearnPool(...) or sklearn_backend(pool)",
        **_each("cuml mig mps", "it does not exist yet"),
    },
    "pool": {
        **_each("starmap starmap_async", _PAIRS),
        **_each("apply call remote spawn", "write pool.run(f, x), or pool.submit(f, x) for a future"),
        **_each("apply_async run_parallel_async", "write pool.submit(f, x), which gives a future"),
        **_each("imap_unordered unordered_map", "write pool.imap(f, xs, ordered=False)"),
        **_each("on subscribe on_event", "write pool.events(), or ComputePool(on_event=function)"),
        **_each("resize scale autoscale", _ELASTIC),
        **_each("shutdown stop terminate join exit end", "write pool.close()"),
        **_each(_COLLECTIONS, _COLLECTION),
        **_each("download get_file", "files do not come back yet; return their content as a value"),
        "current_nodes": "write pool.nodes",
        "gather": "write sky.gather(f(1), f(2)) >> pool",
        "map_async": "write pool.imap(f, xs)",
        "open": "write `with pool:`, or pool.start()",
        "run_parallel": "write pool.run_group(a & b), or (a & b) >> pool",
        "upload": "send files by ComputePool(image=sky.Image(includes=[...]))",
    },
    "function": {
        **_each("remote spawn delay apply_async submit run bind run_async", _SEND),
        **_each("map imap", _MAP),
        "broadcast": "write f(x) @ pool",
        "starmap": _PAIRS,
        "with_retries": "write f.with_options(retries=3)",
    },
    "a call": {
        **_each("gpu gpus num_gpus cpu cpus num_cpus memory accelerator", _OF_A_CALL),
        **_each("image concurrency provider executor", _OF_THE_POOL),
        **_each("retry max_retries num_retries retry_on_interruption", "write retries=3"),
        **_each("backoff delay retry_delay", "a pause between retries does not exist yet"),
        "nodes": "f(x) @ pool runs on all nodes, f(x) @ pool.nodes([0, 2]) on those two",
        "ttl": _LEASES,
    },
    "ComputePool": {
        **_each("gpu gpus num_gpus gpu_count accelerators count", _DEVICES),
        **_each("cpu cpus num_cpus cores", "write vcpus=4, of each node"),
        **_each("memory ram mem", "write memory_gib=16, of each node"),
        **_each("volumes volume mounts", _VOLUME),
        **_each("selection specs providers regions", _SEVERAL),
        **_each("region zone instance_type instance_types", _OF_THE_PROVIDER),
        **_each("pip apt env includes excludes python packages shell_vars", _OF_THE_IMAGE),
        **_each("retries retry retry_on max_restarts retry_on_interruption", _OF_THE_DECORATOR),
        **_each("min_nodes max_nodes autoscale autoscale_idle_timeout idle_timeout", _ELASTIC),
        **_each("workers num_workers max_workers n_jobs processes", "write nodes=2, concurrency=4"),
        **_each("plugins plugin", _DECORATE),
        **_each("ssh_timeout boot_timeout", "write provision_timeout_s=, which is the time until nodes answer"),
        **_each("ssh_retry_interval provision_retry_delay max_provision_attempts", "nodes are retried anyway"),
        **_each("hosts host", 'write provider=sky.SSH(hosts=["gpu1"])'),
        **_each("verbose quiet progress", "write console=True or console=False"),
        "budget": "write budget_usd=",
        "health_checker": "a node that is lost is replaced anyway",
        "provider": 'give sky.Local(), sky.SSH(...) or sky.AWS(); a pool of skyward.toml is ComputePool.named("train")',
        "spot": 'write allocation="spot"',
        "timeout": "write default_timeout_s=",
        "ttl": _LEASES,
        "worker": 'write concurrency=4, executor="thread"',
        "*": f"the provider comes first and the others by name, such as nodes=4; {_SEVERAL}",
    },
    "Image": {
        **_each("packages requirements dependencies pip_packages pip_install", 'write pip=["torch"]'),
        **_each("pip_indexes extra_index_url index", 'write pip_extra_index_url="https://..."'),
        **_each("run commands setup run_commands", "commands while a node is made do not exist yet"),
        **_each("base docker docker_image container image", "container images do not exist yet"),
        **_each("environment envs env_vars environ", 'write env={"NAME": "value"}'),
        **_each("files include copy workdir", 'write includes=["folder"]'),
        **_each("apt_packages apt_install system_packages", 'write apt=["git"]'),
        "conda": "conda environments do not exist yet; pip= and apt= do",
        "metrics": "not needed: the pool's events have NodeUsage",
        "python_version": 'write python="3.12"',
        "skyward_source": "not needed: nodes get the skyward that runs here",
        "*": 'its options are given by name, such as pip=["torch"]',
    },
    "AWS": {
        **_each("instance_timeout request_timeout ttl", "write lease_s=: so long does a machine live without contact"),
        **_each("access_key aws_access_key_id secret_key api_key", "credentials are found as boto3 does; see profile="),
        **_each("allocation_strategy spot allocation", 'write ComputePool(allocation="spot")'),
        **_each("nodes accelerator concurrency image", _OF_THE_POOL),
        "*": 'its options are given by name, such as region="us-east-1"',
    },
    "SSH": {
        **_each("host hostname addresses nodes", 'write hosts=["gpu1", "me@10.0.0.2:2222"]'),
        **_each("key identity_file private_key pem key_path", "write key_file="),
        "hosts": 'write hosts=["gpu1", "me@10.0.0.2:2222"]',
        "password": "passwords are not asked for; put a key there by ssh-copy-id",
        "username": "write user=",
        "*": 'its options are given by name: hosts=["gpu1"]',
    },
    "Local": {
        **_each("nodes concurrency workers cpus num_workers", _OF_THE_POOL),
        "*": "its options are given by name; nodes= and concurrency= are the pool's",
    },
    "provider": _each(_PROVIDERS.lower(), "it does not exist yet; ssh takes any machine"),
}
"""Where the name was written -> the name -> what to write. "*": more arguments by position than there are."""


def suggestion(name: str, known: Iterable[str]) -> str | None:
    """The nearest of the known names; None where none is near enough to be meant."""
    lower = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=_CUTOFF)
    return lower[near[0]] if near else None


def foreign(place: str, name: str) -> str:
    """What the table says of a name at that place; "" where it says nothing."""
    return FOREIGN.get(place, {}).get(name, "")


def advice(place: str, name: str, known: Iterable[str], *, shown: str = "{}=") -> str:
    """What to write instead of a name that does not exist at that place.

    `shown`: how a name is written there; an option by default.
    """
    known = sorted(known)
    near = suggestion(name, known)
    if text := foreign(place, name):
        return text
    if near is not None:
        return f"did you mean {shown.format(near)}?"
    return f"there are {', '.join(known)}" if len(known) <= _SHOWN else f"see help(sky.{place})"
