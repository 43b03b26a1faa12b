//! A page of a server in a real browser, driven by the DevTools protocol; the page keeps updating.
//!
//! The protocol goes over two pipes (`--remote-debugging-pipe`): messages are JSON, each ended by a
//! zero byte.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value, json};

use super::{EXAMINE, Theme};
use crate::{Scratch, need};

/// The longest time until Chromium answers, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A page that is open.
pub struct LivePage {
    browser: Child,
    commands: ChildStdin,
    messages: Receiver<Value>,
    session: String,
    last: u64,
    complaints: Vec<String>,
}

impl LivePage {
    /// Opens the page at a URL. `Err` says why there is no browser.
    ///
    /// # Panics
    /// When Chromium does not carry out a command.
    pub fn open(scratch: &Scratch, url: &str) -> Result<Self, String> {
        need::tools(&["chromium"])?;
        // The browser reads commands from descriptor 3 and writes messages to descriptor 4.
        let mut shell = Command::new("sh");
        shell.args(["-c", "exec chromium \"$@\" 3<&0 4>&1 </dev/null >/dev/null", "chromium"]);
        // Chromium has no sandbox for root; it opens only our page.
        shell.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]);
        shell.args(["--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"]);
        shell.arg(format!("--user-data-dir={}", scratch.path("profile").display()));
        shell.args(["--remote-debugging-pipe", "about:blank"]);
        let pipes = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut browser = pipes.spawn().expect("a shell");
        let commands = browser.stdin.take().expect("a pipe");
        let answers = BufReader::new(browser.stdout.take().expect("a pipe"));
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            for message in answers.split(0) {
                let Ok(message) = message else { return };
                let message = serde_json::from_slice(&message).expect("JSON");
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut page = Self {
            browser,
            commands,
            messages,
            session: String::new(),
            last: 0,
            complaints: Vec::new(),
        };
        let target = page.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = page.call("Target.attachToTarget", attach);
        page.session = attached["sessionId"].as_str().expect("a session").to_owned();
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            page.call(domain, json!({}));
        }
        page.call("Page.navigate", json!({ "url": url }));
        // The answer comes before the document is loaded.
        page.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'");
        Ok(page)
    }

    /// Makes the window this many pixels wide, for a reader who prefers a theme.
    pub fn resize(&mut self, width: u32, theme: Theme) {
        let size =
            json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", size);
        let value = if theme == Theme::Dark { "dark" } else { "light" };
        let features = json!([{ "name": "prefers-color-scheme", "value": value }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": features }));
    }

    /// The value of an expression in the page; a promise is awaited.
    #[track_caller]
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let what = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let found = self.call("Runtime.evaluate", what);
        assert!(found.get("exceptionDetails").is_none(), "{expression}: {found}");
        found["result"]["value"].clone()
    }

    /// Waits until an expression is true in the page.
    #[track_caller]
    pub fn wait_for(&mut self, expression: &str) {
        let is_true = || self.evaluate(expression) == true;
        assert!(crate::eventually(LIMIT, is_true), "not so in the page: {expression}");
    }

    /// What the browser finds about the page: the contrast and size of its texts, its width, its
    /// plots.
    pub fn examine(&mut self) -> Value {
        self.evaluate(&format!("(() => {{ {EXAMINE} return examine(); }})()"))
    }

    /// A PNG of the whole page.
    pub fn picture(&mut self) -> Vec<u8> {
        let how = json!({ "format": "png", "captureBeyondViewport": true });
        let picture = self.call("Page.captureScreenshot", how);
        let text = picture["data"].as_str().expect("a picture");
        openssl::base64::decode_block(text).expect("base64")
    }

    /// Presses and releases the Tab key.
    pub fn press_tab(&mut self) {
        let key = json!({ "key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9 });
        self.press(key);
    }

    /// Presses and releases the Enter key.
    pub fn press_enter(&mut self) {
        let key = json!({ "key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13 });
        self.press(key);
    }

    fn press(&mut self, mut key: Value) {
        key["type"] = json!("rawKeyDown");
        self.call("Input.dispatchKeyEvent", key.clone());
        if key["key"] == "Enter" {
            self.call("Input.dispatchKeyEvent", json!({ "type": "char", "text": "\r" }));
        }
        key["type"] = json!("keyUp");
        self.call("Input.dispatchKeyEvent", key);
    }

    /// The messages in the console, and exceptions that nothing caught, since the last call.
    pub fn complaints(&mut self) -> Vec<String> {
        // After this answer, all earlier messages have arrived.
        self.evaluate("0");
        std::mem::take(&mut self.complaints)
    }

    #[track_caller]
    fn call(&mut self, method: &str, params: Value) -> Value {
        self.last += 1;
        let mut command = json!({ "id": self.last, "method": method, "params": params });
        if !self.session.is_empty() {
            command["sessionId"] = json!(self.session);
        }
        let mut bytes = command.to_string().into_bytes();
        bytes.push(0);
        self.commands.write_all(&bytes).expect("the browser runs");
        loop {
            let mut message = self.messages.recv_timeout(LIMIT).expect("the browser answers");
            if message["id"] == self.last {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].take();
            }
            let method = message["method"].as_str().unwrap_or_default();
            let complains =
                ["Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"];
            if complains.contains(&method) {
                self.complaints.push(message["params"].to_string());
            }
        }
    }
}

impl Drop for LivePage {
    fn drop(&mut self) {
        // The browser may have ended already.
        let _ = self.browser.kill();
        let _ = self.browser.wait();
    }
}
