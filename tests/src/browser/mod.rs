//! Pages in a real browser: headless Chromium, as wide as a phone or as a reader's window.

mod live;

use std::path::PathBuf;

pub use self::live::LivePage;

/// The colour scheme that the reader prefers.
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
/// The width of a window on a desk.
pub const DESK: u32 = 1200;

/// A page that shows what is on a terminal's screen: its text with SGR sequences.
pub fn terminal_page(screen: &str) -> String {
    let screen = serde_json::to_string(screen).expect("text").replace('<', "\\u003c");
    include_str!("terminal.html").replace("SCREEN", &screen)
}

/// The folder for pictures, if the environment names one.
pub fn pictures() -> Option<PathBuf> {
    std::env::var_os("BLOCKHOUSE_PICTURES").map(PathBuf::from)
}

/// A function that finds each text's contrast with its background (WCAG 2, section 1.4.3) and its
/// size. It returns the worst values, the width of the page, and what is beyond the screen.
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
  const beyond = [...document.body.querySelectorAll('*')].filter(one =>
    box(one).right > innerWidth && !one.parentElement.closest('.table, svg')).map(one =>
    `${one.localName} to ${box(one).right}: ${one.textContent.slice(0, 60)}`);
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
    texts, worst, smallest, cut, crossed: crossed.slice(0, 5), beyond, width: document.documentElement.scrollWidth, screen: innerWidth,
    dark: matchMedia('(prefers-color-scheme: dark)').matches,
    ground: luminance(ground(document.body)), plots: document.querySelectorAll('svg').length,
  };
}
"#;

impl Picture {
    /// Decodes a PNG.
    ///
    /// # Panics
    /// When it is not a complete PNG in colours.
    pub fn of(png: &[u8]) -> Self {
        let mut decoder = png::Decoder::new(std::io::Cursor::new(png));
        decoder.set_transformations(png::Transformations::normalize_to_color8());
        let mut reader = decoder.read_info().expect("a PNG");
        let mut bytes = vec![0; reader.output_buffer_size().expect("it fits into memory")];
        let info = reader.next_frame(&mut bytes).expect("a whole PNG");
        let samples = info.color_type.samples();
        assert!(samples >= 3, "a picture in colours");
        let pixels = bytes[..info.buffer_size()].chunks_exact(samples);
        Self { pixels: pixels.map(|one| [one[0], one[1], one[2]]).collect() }
    }
}
