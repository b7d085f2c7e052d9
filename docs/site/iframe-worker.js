// Search for a site that is read from a folder: browsers start no worker from a file, so its script runs in a hidden
// frame. The theme looks for `iframe-worker` in the name of a polyfill and for `IFrameWorker` in the page. Without this
// file it would load its own from another server.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.inside = new Promise((resolve, reject) => {
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inside.document.createElement("script")
          script.src = new URL(url, location).href
          script.onload = () => resolve(inside)
          script.onerror = () => reject(new Error(`cannot load ${script.src}`))
          inside.document.body.append(script)
        }, { once: true })
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.inside.then(inside => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
