"""Advice for names that people know from other libraries, or misspell.

One table holds names from the reference project, other libraries and common habits. A name that is in no table gets
the nearest existing name. A feature that "does not exist yet" leaves the table when it is added.
"""

from __future__ import annotations

from collections.abc import Iterable

_CUTOFF = 0.72
"""Above difflib's default 0.6, which takes "gpus" for "vcpus" and "volumes" for "roles"."""
_SHOWN = 12
"""Most names that a message lists; for longer lists it points to the help."""

_ELSEWHERE = "does not exist yet; use sky.AWS, sky.Local, or sky.SSH for any machine that ssh reaches"
_ACTOR = "write @sky.actor above the class; Model(...) >> pool makes an object"
_VOLUME = 'write ComputePool(volumes={"/data": sky.Volume("cache")})'
_UPLOAD = 'write pool.upload("data"), or pool.upload("here", "there")'
_POOL = "open a pool: with sky.ComputePool(...) as pool; with name= and detached_for_s= it outlives the program"
_ATTACH = 'write sky.ComputePool.attach("train")'
_ELASTIC = "write nodes=(2, 8): the pool grows while calls wait, and shrinks when it is idle"
_IDLE = "write idle_timeout_s=600: an idle pool gives its machines back"
_RAY = 'write ComputePool(engine="ray"), or provider=sky.RayCluster("me@head") for a cluster that you have'
_SEVERAL = "write ComputePool(any_of=[sky.SSH(hosts=[...]), sky.AWS()]); its machines come from one of them"
_DEVICES = 'write accelerator="A100", or accelerator=sky.accelerators.A100(count=8) for 8 per node'
_OF_THE_POOL = "set this option of the pool: sky.ComputePool(...)"
_OF_THE_IMAGE = "set this option of the image: ComputePool(image=sky.Image(...))"
_OF_THE_PROVIDER = "set this option of the provider: sky.AWS(region=..., instance_types=[...])"
_OF_THE_DECORATOR = "set this option of a call: @sky.compute(retries=3, timeout_s=60)"
_DECORATE = "decorate the function: @sky.integrations.torch below @sky.compute"
_SEND = "send the call with an operator: f(x) >> pool for its value, f(x) > pool for a future"
_MAP = "write pool.map(f, xs)"
_PAIRS = "write pool.map(f, xs, ys) for several iterables, or pool.map(f, *zip(*pairs)) for pairs"
_OPEN = "open a pool: with sky.ComputePool(provider=sky.Local()) as pool"
_LEASES = (
    "leave it out: leases replace it. Nodes end with the `with` block or this process, never by the clock: "
    "a ten-hour run survives, and a forgotten machine ends in minutes"
)
_PROVIDERS = (
    "Azure Container CoreWeave GCP Hyperstack Kubernetes Lambda LambdaLabs Nebius OCI Paperspace RunPod Scaleway Slurm "
    "TensorDock VastAI Verda Vultr"
)
_INTEGRATIONS = (
    "JoblibPool ScikitLearnPool accelerate diloco jax keras lightning ray_cluster tensorflow torch transformers"
)


def _each(names: str, text: str) -> dict[str, str]:
    return {name: text.replace("{name}", name) for name in names.split()}


FOREIGN: dict[str, dict[str, str]] = {
    "skyward": {
        **_each(_PROVIDERS, f"the provider {{name}} {_ELSEWHERE}"),
        **_each(_INTEGRATIONS, "write sky.integrations.{name}"),
        **_each("A100 H100 H200 L4 T4", "write sky.accelerators.{name}()"),
        **_each("S3Volume storage Storage volumes mount", _VOLUME),
        **_each("Client server App Session", _POOL),
        **_each("function remote task delayed", f"write @sky.compute above the function, and {_SEND}"),
        **_each("init pool connect", _OPEN),
        **_each("attach reattach", _ATTACH),
        **_each("Ray Cluster", _RAY),
        **_each("Actor cls", _ACTOR),
        **_each("Queue", "write sky.queue(name)"),
        **_each("Offer offers InstanceType", "write pool.offers(), or `skyward offers` in a shell"),
        **_each("get run submit broadcast", _SEND),
        "put": "write ref = pool.put(value)",
        "ObjectRef": "write sky.Ref; pool.put(value) and f(x).keep() >> pool return one",
        "Compute": 'write sky.ComputePool(...), or sky.ComputePool.named("train") for a pool of skyward.toml',
        "Executor": "write pool.executor()",
        "LogConfig": "write ComputePool(logs=sky.LogFiles(folder))",
        "CallbackWriter": "write ComputePool(logs=function); it receives each line",
        "redirect_output": "write ComputePool(logs=function); it receives each line",
        "DistributedSampler": "use torch's own, or sky.shard(data) without torch",
        "MultiPool": "open each pool: with sky.ComputePool(...) as a, sky.ComputePool(...) as b",
        "PendingFunction": "write sky.PendingCompute",
        "Spec": _SEVERAL,
        "Worker": 'write ComputePool(concurrency=4, executor="thread")',
        "main": f"call your program's function yourself; {_OPEN}",
        "map": _MAP,
        "metrics": "write ComputePool(on_event=function); it receives each sky.events.NodeUsage",
        "plugins": _DECORATE,
        "sky": "write `import skyward as sky`, then f(x) >> sky: the module itself is a target",
    },
    "integrations": {
        "deepspeed": "use it through sky.integrations.accelerate, lightning or transformers",
        "huggingface": "write sky.integrations.transformers",
        "joblib": "write sky.integrations.JoblibPool(...) or joblib_backend(pool)",
        "pytorch": "write sky.integrations.torch",
        "scikit_learn": "write sky.integrations.ScikitLearnPool(...) or sklearn_backend(pool)",
        "sklearn": "write sky.integrations.ScikitLearnPool(...) or sklearn_backend(pool)",
        **_each("cuml mig mps", "this integration does not exist yet"),
    },
    "pool": {
        **_each("starmap starmap_async", _PAIRS),
        **_each("apply call remote spawn", "write pool.run(f, x), or pool.submit(f, x) for a future"),
        **_each("apply_async run_parallel_async", "write pool.submit(f, x) for a future"),
        **_each("imap_unordered unordered_map", "write pool.imap(f, xs, ordered=False)"),
        **_each("on subscribe on_event", "write pool.events(), or ComputePool(on_event=function)"),
        **_each("resize adapt set_nodes", "write pool.scale(4), for a pool with nodes=(2, 8)"),
        "autoscale": _ELASTIC,
        **_each("shutdown stop terminate join exit end", "write pool.close()"),
        **_each("put_file put_files send_file send_files copy_to rsync sync scp push cp mount add_file", _UPLOAD),
        **_each("get_file get_files fetch fetch_file copy_from pull", 'write pool.download("remote/file", "here")'),
        **_each("tunnel port_forward forward_port expose open_port tensorboard", "write pool.forward(6006)"),
        "current_nodes": "write pool.nodes",
        "gather": "write sky.gather(f(1), f(2)) >> pool",
        "map_async": "write pool.imap(f, xs)",
        "open": "write `with pool:`, or pool.start()",
        "run_parallel": "write pool.run_group(a & b), or (a & b) >> pool",
    },
    "function": {
        **_each("remote spawn delay apply_async submit run bind run_async", _SEND),
        **_each("map imap", _MAP),
        "broadcast": "write f(x) @ pool",
        "starmap": _PAIRS,
        "with_retries": "write f.with_options(retries=3)",
    },
    "a call": {
        **_each("gpu num_gpus", "write gpus=1"),
        **_each("cpu num_cpus cores vcpus", "write cpus=2"),
        **_each("memory memory_gb ram", "write memory_gib=16"),
        **_each("num_nodes world_size", "write nodes=2"),
        **_each("image concurrency provider executor", _OF_THE_POOL),
        **_each("retry max_retries num_retries", "write retries=3"),
        **_each("backoff delay retry_delay", "write retry_delay_s=2, the seconds before the first retry; they double"),
        **_each("retry_on_interruption retry_on_preemption", "write retries_on_loss=3"),
        "ttl": _LEASES,
    },
    "an actor": {
        **_each("gpu num_gpus", "write gpus=1"),
        **_each("cpu num_cpus cores vcpus", "write cpus=2"),
        **_each("memory memory_gb ram", "write memory_gib=16"),
        **_each("max_concurrency concurrency_groups", "write concurrency=4"),
        **_each("lifetime", "set name=: an actor with a name lives until it is closed"),
    },
    "ComputePool": {
        **_each("gpu gpus num_gpus gpu_count accelerators count", _DEVICES),
        **_each("cpu cpus num_cpus cores", "write vcpus=4, which counts per node"),
        **_each("memory ram mem", "write memory_gib=16, which counts per node"),
        **_each("volume mounts file_mounts storage", _VOLUME),
        **_each("specs providers provider_list clouds", _SEVERAL),
        "regions": 'write region=["us-east-1", "eu-west-1"]',
        **_each("zone instance_type instance_types", _OF_THE_PROVIDER),
        **_each("pip apt env includes excludes python packages shell_vars", _OF_THE_IMAGE),
        **_each("retries retry retry_on max_restarts retry_on_interruption", _OF_THE_DECORATOR),
        **_each("min max desired min_nodes max_nodes autoscale autoscaling adaptive", _ELASTIC),
        **_each("autoscale_idle_timeout idle_timeout autostop idle_duration scaledown_window keep_alive", _IDLE),
        **_each("workers num_workers max_workers n_jobs processes", "write nodes=2, concurrency=4"),
        **_each("plugins plugin", _DECORATE),
        **_each("ssh_timeout boot_timeout", "write provision_timeout_s=, the time limit until nodes answer"),
        **_each("ssh_retry_interval provision_retry_delay max_provision_attempts", "omit it: nodes are always retried"),
        **_each("hosts host", 'write provider=sky.SSH(hosts=["gpu1"])'),
        **_each("verbose quiet progress", "write console=True or console=False"),
        **_each("ray cluster ray_address", _RAY),
        "budget": "write budget_usd=",
        "health_checker": "omit it: lost nodes are always replaced",
        "provider": 'pass sky.Local(), sky.SSH(...) or sky.AWS(), or write ComputePool.named("train") for skyward.toml',
        "spot": 'write allocation="spot"',
        "timeout": "write default_timeout_s=",
        "ttl": _LEASES,
        "worker": 'write concurrency=4, executor="thread"',
        "*": f"pass the provider first and the others by name, such as nodes=4; {_SEVERAL}",
    },
    "Image": {
        **_each("packages dependencies pip_packages pip_install", 'write pip=["torch"]'),
        **_each("requirements_txt requirements_file pip_install_from_requirements", 'write requirements="file.txt"'),
        **_each("extra_index_url index", 'write pip_extra_index_url="https://..."'),
        **_each("lockfile lock_file uv_lock uv_sync", 'write lock="uv.lock"'),
        **_each("commands setup setup_commands run_commands", 'write run=["make data"]'),
        **_each("base docker docker_image image", 'write container="debian:12"'),
        **_each("environment envs env_vars environ", 'write env={"NAME": "value"}'),
        **_each("files include copy workdir", 'write includes=["folder"]'),
        **_each("apt_packages apt_install system_packages", 'write apt=["git"]'),
        "conda": "conda environments do not exist yet; use pip= and apt=",
        "metrics": "omit it: the pool's events include NodeUsage",
        "python_version": 'write python="3.12"',
        "skyward_source": "omit it: nodes always get the skyward that runs here",
        "*": 'pass options by name, such as pip=["torch"]',
    },
    "AWS": {
        **_each("instance_timeout request_timeout ttl", "write lease_s=, how long a machine lives without contact"),
        **_each("access_key aws_access_key_id secret_key api_key", "set profile=, or configure boto3's credentials"),
        **_each("allocation_strategy spot allocation", 'write ComputePool(allocation="spot")'),
        **_each("nodes accelerator concurrency image", _OF_THE_POOL),
        "*": 'pass options by name, such as region="us-east-1"',
    },
    "SSH": {
        **_each("host hostname addresses nodes", 'write hosts=["gpu1", "me@10.0.0.2:2222"]'),
        **_each("key identity_file private_key pem key_path", "write key_file="),
        "hosts": 'write hosts=["gpu1", "me@10.0.0.2:2222"]',
        "password": "passwords are not supported; install a key with ssh-copy-id",
        "username": "write user=",
        "*": 'pass options by name: hosts=["gpu1"]',
    },
    "RayCluster": {
        **_each("hosts host head", 'pass a machine of the cluster first: sky.RayCluster("me@head")'),
        "shell": 'write sky.RayCluster("me@head"), or a command: ["kubectl", "exec", "-i", "head", "--"]',
    },
    "Volume": {
        **_each("bucket prefix", 'write sky.Volume("s3://bucket/prefix")'),
        **_each("name path url uri", 'pass it first: sky.Volume("cache")'),
        "storage": 'write sky.Volume("s3://bucket/prefix"); credentials are variables of the image: Image(env={...})',
        "*": 'pass one source, such as sky.Volume("cache")',
    },
    "Local": {
        **_each("nodes concurrency workers cpus num_workers", _OF_THE_POOL),
        "*": "pass options by name, and nodes= and concurrency= to the pool",
    },
    "provider": _each(_PROVIDERS.lower(), "this provider does not exist yet; use ssh for any machine"),
}
"""Place of the name -> the name -> advice. "*" stands for too many positional arguments."""


def suggestion(name: str, known: Iterable[str]) -> str | None:
    """Return the nearest of the known names, or None if none is near enough."""
    import difflib  # only for a message

    lower = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=_CUTOFF)
    return lower[near[0]] if near else None


def foreign(place: str, name: str) -> str:
    """Return the table's advice for a name at that place, or ""."""
    return FOREIGN.get(place, {}).get(name, "")


def advice(place: str, name: str, known: Iterable[str], *, shown: str = "{}=") -> str:
    """Return advice for a name that does not exist at that place.

    `shown` formats a name the way users write it there; by default as an option.
    """
    known = sorted(known)
    near = suggestion(name, known)
    if text := foreign(place, name):
        return text
    if near is not None:
        return f"did you mean {shown.format(near)}?"
    if not known:
        return "it has no public name; add one"
    return f"use one of {', '.join(known)}" if len(known) <= _SHOWN else f"see help(sky.{place})"


def no_attribute(owner: object, name: str, place: str, known: Iterable[str], *, problem: str = "") -> AttributeError:
    """Return the error for a name that an object does not have, with advice for names that people write.

    `problem` is the first part of the message; by default Python's own words.
    """
    text = problem or f"{type(owner).__name__!r} object has no attribute {name!r}"
    if not name.startswith("_"):  # libraries probe for such names, and show no message
        text = f"{text}; {advice(place, name, known, shown='{}')}"
    # Without `obj`, Python adds no suggestion of its own behind ours.
    return AttributeError(text, name=name, obj=None)
