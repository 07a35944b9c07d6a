// Browsers start no worker from a page on disk. There, the site's search runs in
// a hidden frame: a worker's script only listens to messages and posts some.
if (location.protocol === 'file:') {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement('iframe');
      const script = document.createElement('script');
      script.src = url;
      frame.hidden = true;
      frame.srcdoc = script.outerHTML;
      this.frame = new Promise(resolve => {
        frame.onload = () => {
          const message = data => new MessageEvent('message', {data});
          frame.contentWindow.postMessage = data =>
            this.dispatchEvent(message(data));
          resolve(data => frame.contentWindow.dispatchEvent(message(data)));
        };
      });
      document.body.append(frame);
    }
    async postMessage(data) {
      (await this.frame)(data);
    }
  };
}
