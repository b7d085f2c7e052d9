"""Our callbacks and evaluations inside other frameworks' training loops: a folder for each framework.

    transformers.Trainer(..., callbacks=[HFCallbacks([JsonLogger()])])
    lightning.Trainer(..., callbacks=[LightningCallbacks([JsonLogger()])])
    keras_model.fit(..., callbacks=[KerasCallbacks([JsonLogger()])])

Each folder has `callbacks`, which translate that framework's events into ours and our control into its own,
`evaluation`, which runs beside its training, and the framework's quirks. Events that the framework does not have are
listed in the docstring of `callbacks`, and warned of once where a callback waits for them. `run`, `evaluations`,
`foreign` and `json_state` are shared. The modules of a folder import its framework; `skyward.training` and
`skyward.training.sakura` load them when a name is first used.
"""
