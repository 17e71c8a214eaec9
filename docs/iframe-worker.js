// The site's search is a worker, and browsers start none for a page that was opened as a file. There it runs in a
// hidden frame instead, which loads the same script; messages go both ways as a worker's do.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.started = new Promise((resolve) => {
        this.frame.addEventListener("load", () => this.start(url, resolve), { once: true });
      });
      document.body.append(this.frame);
    }

    start(url, resolve) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.addEventListener("load", () => resolve(inside), { once: true });
      script.src = url;
      inside.document.body.append(script);
    }

    postMessage(data) {
      this.started.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
