// The search of pages that are opened from the file system, where browsers refuse to start a worker: its script runs in
// a hidden frame, whose window has what the script expects of a worker.
if (location.protocol === "file:") {
  // The script looks for this name to learn that it runs in a frame, and where its own files lie.
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }));
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each);
      };
      this.ready = this.load(url);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        this.scope.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
