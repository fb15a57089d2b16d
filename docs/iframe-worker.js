// The search runs in a worker. A browser starts none for a page that is opened from disk: there a frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      this.inner = frame.contentWindow
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      const script = this.inner.document.createElement("script")
      this.loaded = new Promise(done => script.addEventListener("load", done))
      script.src = url
      this.inner.document.head.append(script)
    }

    async postMessage(data) {
      await this.loaded
      this.inner.dispatchEvent(new MessageEvent("message", {data}))
    }
  }
}
