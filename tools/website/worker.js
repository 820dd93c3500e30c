// The search runs in a worker. Browsers start no worker from a file, so a page that is opened from a folder runs its script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = resolve;
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
