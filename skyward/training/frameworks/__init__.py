"""Our callbacks and evaluations inside other frameworks' training loops, with one folder for each framework.

    transformers.Trainer(..., callbacks=[HFCallbacks([JsonLogger()])])
    lightning.Trainer(..., callbacks=[LightningCallbacks([JsonLogger()])])
    keras_model.fit(..., callbacks=[KerasCallbacks([JsonLogger()])])

In each folder, `callbacks` translates the framework's events into ours and our control into the framework's.
`evaluation` evaluates asynchronously during its training. The docstring of `callbacks` lists the events that the
framework lacks. A callback that handles only such events causes one warning.

`run`, `evaluations`, `foreign` and `json_state` are shared. The modules of a folder import its framework.
`skyward.training` and `skyward.training.sakura` import them when a name is first used.
"""
