"""Errors of providers: a machine cannot be had, reached or terminated."""

from __future__ import annotations

from .base import SkywardError


class ProviderError(SkywardError):
    """A provider of machines refused a request, or failed.

    Raised while a pool starts, replaces a node or closes. Subclasses say why; see the message of other cases.

    Attributes:
        code: The provider's own error code; empty if there is none.

    Example:
        try:
            with sky.ComputePool(provider=sky.AWS(), nodes=4) as pool:
                train(data) @ pool
        except sky.errors.ProviderError as error:
            print(error.code, error)
    """

    code: str = ""


class NoCapacity(ProviderError):
    r"""No machines of the requested kind are available now.

    Raised after every suitable offer was tried, or if no offer fits. Ask for fewer nodes or another type, allow other
    zones, choose another `allocation`, or try again later.

    Attributes:
        tried: Offers that were tried, each with the provider's answer.
        field: Name of the option that asks for more than there is; empty if it is none in particular.
        value: Value of that option.

    Example:
        try:
            pool = sky.ComputePool(provider=sky.AWS(), accelerator="H100", allocation="spot").start()
        except sky.errors.NoCapacity as error:
            print(*error.tried, sep="\n")
            pool = sky.ComputePool(provider=sky.AWS(), accelerator="A100").start()
    """

    retryable = True
    tried: tuple[str, ...] = ()
    field: str = ""
    value: object = None


class AuthFailed(ProviderError):
    """A provider, or a machine itself, refused the credentials.

    Check the profile or the keys of the account, and on SSH hosts the user name and the key.

    Attributes:
        host: The machine that refused; empty if the provider did.

    Example:
        try:
            sky.ComputePool(provider=sky.SSH(hosts=["gpu1"])).start()
        except sky.errors.AuthFailed as error:
            print(f"run: ssh-copy-id {error.host}")
    """

    host: str = ""


class HostKeyUnknown(ProviderError):
    """The SSH host key of a machine is not known here, so its identity cannot be verified.

    Compare the fingerprint with one from a trusted source. Then add `known_hosts_line` to your known_hosts file, or
    pass the key to the provider.

    Attributes:
        host: The machine.
        fingerprint: Fingerprint of the key that the machine sent; empty if the machine could not be asked for it.
        known_hosts_line: Line to add to known_hosts; empty if the machine could not be asked for its key.

    Example:
        try:
            sky.ComputePool(provider=sky.SSH(hosts=["gpu1"])).start()
        except sky.errors.HostKeyUnknown as error:
            print(error.fingerprint, error.known_hosts_line)
    """

    host: str = ""
    fingerprint: str = ""
    known_hosts_line: str = ""


class HostKeyChanged(ProviderError):
    """The SSH host key of a machine differs from the known one.

    Either the machine was reinstalled, or another machine answers in its place. Never accepted, whatever the policy. If
    the change is legitimate, remove the old key with `ssh-keygen -R HOST`.

    Attributes:
        host: The machine.
        fingerprint: Fingerprint of the key that the machine sent.

    Example:
        try:
            sky.ComputePool(provider=sky.SSH(hosts=["gpu1"])).start()
        except sky.errors.HostKeyChanged as error:
            print(f"{error.host} now has {error.fingerprint}")
    """

    host: str = ""
    fingerprint: str = ""


class QuotaExceeded(ProviderError):
    r"""The quota of the account does not allow that many machines.

    Ask for fewer nodes, use another region, or request a higher quota from the provider.

    Attributes:
        tried: Offers that were tried, each with the provider's answer.

    Example:
        try:
            sky.ComputePool(provider=sky.AWS(), nodes=64).start()
        except sky.errors.QuotaExceeded as error:
            print(error.code, *error.tried, sep="\n")
    """

    tried: tuple[str, ...] = ()


class Throttled(ProviderError):
    """The provider received too many requests and did nothing.

    skyward retries such requests itself, with growing pauses. This error means that the retries were not enough. Try
    again later.

    Example:
        try:
            offers = sky.ComputePool(provider=sky.AWS()).offers()
        except sky.errors.Throttled:
            time.sleep(60)
    """

    retryable = True


class OutcomeUnknown(ProviderError):
    """A request to the provider failed, and nobody knows whether it was carried out.

    The same call may succeed when it is made again, so `retryable` is True. Machines that the request may have created
    are on record here. The pool, `skyward gc` and the machines' own leases end them.

    Example:
        try:
            sky.ComputePool(provider=sky.AWS()).start()
        except sky.errors.OutcomeUnknown:
            subprocess.run(["skyward", "gc"], check=True)
    """

    retryable = True


class BudgetExceeded(ProviderError):
    """The pool would cost more than its `budget_usd`, or was closed before it did.

    Raised on entering a pool if no offer fits the budget; then nothing was launched. Later the pool is closed before
    the budget is spent, and open calls raise this error. Raise the budget, or ask for less.

    Attributes:
        budget_usd: The budget, in USD.
        cost_usd: Cost so far, or the lowest possible cost, in USD.

    Example:
        try:
            with sky.ComputePool(provider=sky.AWS(), budget_usd=5) as pool:
                train(data) >> pool
        except sky.errors.BudgetExceeded as error:
            print(f"{error.cost_usd:.2f} of {error.budget_usd} USD spent")
    """

    budget_usd: float = 0.0
    cost_usd: float = 0.0


class ForeignState(ProviderError):
    """Local records belong to another account or region, so skyward does not act on them.

    Switch to the account that the message names, then run the command again.

    Attributes:
        recorded: Account and region in the record, as the provider names them.
        current: Account and region now.

    Example:
        try:
            skyward.pool.fleet.end("train-1a2b3c4d")
        except sky.errors.ForeignState as error:
            print(f"switch from {error.current} to {error.recorded}")
    """

    recorded: str = ""
    current: str = ""


class TerminateFailed(ProviderError):
    """Machines may still be running and cost money, or resources that cost nothing, such as keys, still exist.

    Run the `command`, or `skyward gc`. The records stay until everything is gone.

    Attributes:
        ids: The provider's ids of the resources.
        command: Shell command that ends them by hand.

    Example:
        try:
            skyward.pool.fleet.end("train-1a2b3c4d")
        except sky.errors.TerminateFailed as error:
            print(f"still there: {error.ids}; run {error.command}")
    """

    ids: tuple[str, ...] = ()
    command: str = ""
