"""Our callbacks inside other frameworks' training loops: each folder here translates one framework's events into ours,
and our control into what that framework understands, and does nothing else. What has no counterpart there is named in
the docstring of its `callbacks` and warned of once, where a callback waits for it.

    transformers.Trainer(..., callbacks=[HFCallbacks([JsonLogger()])])
    lightning.Trainer(..., callbacks=[LightningCallbacks([JsonLogger()])])
    keras_model.fit(..., callbacks=[KerasCallbacks([JsonLogger()])])

A framework is imported when its class is first asked for, as that is a subclass of the framework's own.
"""
