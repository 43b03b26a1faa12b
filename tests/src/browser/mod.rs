//! Pages in a real browser: headless Chromium, with a frame as wide as a phone or as a reader's window.

mod live;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

pub use self::live::LivePage;
use crate::{Scratch, need, run_within, tool};

/// What the reader prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Theme {
    /// Dark text on a light ground.
    Light,
    /// Light text on a dark ground.
    Dark,
}

/// A picture of a page.
pub struct Picture {
    /// Red, green and blue of each pixel.
    pub pixels: Vec<[u8; 3]>,
}

/// The width of a phone, in pixels.
pub const PHONE: u32 = 390;
/// That of a window on a desk.
pub const DESK: u32 = 1200;

/// A page that shows what is on a terminal's screen: its text with SGR sequences.
pub fn terminal_page(screen: &str) -> String {
    let screen = serde_json::to_string(screen).expect("text").replace('<', "\\u003c");
    include_str!("terminal.html").replace("SCREEN", &screen)
}

/// The folder for pictures, if somebody wants them.
pub fn pictures() -> Option<PathBuf> {
    std::env::var_os("BLOCKHOUSE_PICTURES").map(PathBuf::from)
}

/// The page of a file, shown in a frame of some width.
pub struct Browser {
    width: u32,
    frame: PathBuf,
    profile: PathBuf,
    picture: PathBuf,
}

/// More than any page of ours takes, at that width.
const HEIGHT: u32 = 14_000;

/// A function that asks each text for its contrast with what it stands on (WCAG 2, section 1.4.3) and its size, and returns
/// the worst of all, and how wide the page is.
const EXAMINE: &str = r#"
const channels = colour => colour.match(/[\d.]+/g).map(Number);
const luminance = ([r, g, b]) => [r, g, b].map(c => c / 255)
  .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
function ground(element) {
  for (let at = element; at; at = at.parentElement) {
    const colour = channels(getComputedStyle(at).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255];
}
function examine() {
  let texts = 0, worst = [99, ''], smallest = [99, ''];
  const box = element => element.getBoundingClientRect();
  const crosses = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const crossed = [...document.querySelectorAll('svg')].flatMap(svg =>
    [...svg.querySelectorAll('text')].filter(text =>
      [...svg.querySelectorAll('line, circle')].some(line => {
        const { left, right, top, bottom } = box(line);
        return crosses(box(text), { left: left - .1, right: right + .1, top: top - .1, bottom: bottom + .1 });
      })).map(text => text.textContent));
  const cut = [...document.querySelectorAll('.table')].filter(table => table.scrollWidth > table.clientWidth).length;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement, words = node.data.trim();
    if (!words || ['SCRIPT', 'STYLE', 'title'].includes(element.tagName)) continue;
    const style = getComputedStyle(element), svg = element.closest('svg');
    const ink = svg ? style.fill : style.color;
    const zoom = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    const ratio = contrast(luminance(channels(ink)), luminance(ground(element)));
    const size = parseFloat(style.fontSize) * zoom;
    if (ratio < worst[0]) worst = [ratio, words];
    if (size < smallest[0]) smallest = [size, words];
    texts++;
  }
  return {
    texts, worst, smallest, cut, crossed: crossed.slice(0, 5), width: document.documentElement.scrollWidth, screen: innerWidth,
    dark: matchMedia('(prefers-color-scheme: dark)').matches,
    ground: luminance(ground(document.body)), plots: document.querySelectorAll('svg').length,
  };
}
"#;

const FRAME: &str = r#"<!DOCTYPE html><meta name="color-scheme" content="light dark">
<style>body { margin: 0 } iframe { border: 0; width: WIDTHpx; height: 100vh }</style>
<script>addEventListener('message', e => document.body.dataset.found = JSON.stringify(e.data))</script>
<body><iframe src="page.html"></iframe></body>"#;

impl Browser {
    /// Shows the page of a file in a frame of so many pixels. `Err` says why there is no browser.
    pub fn new(scratch: &Scratch, page: &Path, width: u32) -> Result<Self, String> {
        need::tools(&["chromium"])?;
        let text = std::fs::read_to_string(page).expect("the page is there");
        let write = |name: &str, text: &str| {
            let path = scratch.path(name);
            std::fs::write(&path, text).expect("scratch folders can be written");
            path
        };
        let tell = "addEventListener('load', () => parent.postMessage(examine(), '*'))";
        let script = format!("<script>{EXAMINE}{tell}</script></head>");
        write("page.html", &text.replace("</head>", &script));
        let frame = write("frame.html", &FRAME.replace("WIDTH", &width.to_string()));
        Ok(Self {
            width,
            frame,
            profile: scratch.path("profile"),
            picture: scratch.path("picture.png"),
        })
    }

    fn run(&self, theme: Theme, what: &[&str]) -> String {
        let mut chromium = tool("chromium");
        // It has no sandbox for root, and opens nothing but our page.
        chromium.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]);
        chromium.args(["--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"]);
        let scheme = if theme == Theme::Dark { 0 } else { 1 };
        chromium.arg(format!("--blink-settings=preferredColorScheme={scheme}"));
        chromium.arg(format!("--user-data-dir={}", self.profile.display()));
        // Narrower than 500 no window gets.
        let window = self.width.max(500);
        chromium.arg(format!("--window-size={window},{HEIGHT}")).args(what);
        chromium.arg(format!("file://{}", self.frame.display()));
        run_within(Duration::from_secs(120), &mut chromium).success().stdout
    }

    /// What the page's own browser finds out about it.
    pub fn examine(&self, theme: Theme) -> Value {
        let page = self.run(theme, &["--virtual-time-budget=5000", "--dump-dom"]);
        let found = page.split("data-found=\"").nth(1).and_then(|rest| rest.split('"').next());
        let found = found.unwrap_or_else(|| panic!("the page told nothing: {page}"));
        let json = found.replace("&quot;", "\"").replace("&lt;", "<").replace("&gt;", ">");
        serde_json::from_str(&json.replace("&amp;", "&")).expect("JSON")
    }

    /// What it looks like.
    pub fn picture(&self, theme: Theme) -> Picture {
        self.run(theme, &[&format!("--screenshot={}", self.picture.display())]);
        let file = std::fs::File::open(&self.picture).expect("the picture");
        let mut decoder = png::Decoder::new(std::io::BufReader::new(file));
        decoder.set_transformations(png::Transformations::normalize_to_color8());
        let mut reader = decoder.read_info().expect("a PNG");
        let mut bytes = vec![0; reader.output_buffer_size().expect("it fits into memory")];
        let info = reader.next_frame(&mut bytes).expect("a whole PNG");
        let samples = info.color_type.samples();
        assert!(samples >= 3, "a picture in colours");
        let pixels = bytes[..info.buffer_size()].chunks_exact(samples);
        Picture { pixels: pixels.map(|one| [one[0], one[1], one[2]]).collect() }
    }
}
