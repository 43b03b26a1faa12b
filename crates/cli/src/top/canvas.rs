//! Character cells of a screen: drawing, and output of the lines that changed.
//!
//! Guarantee: drawing in an [`Area`] changes no cell outside of it.

use std::collections::VecDeque;
use std::io::{self, Write};

use crossterm::cursor::MoveTo;
use crossterm::queue;
use crossterm::style::{ContentStyle, PrintStyledContent, Stylize};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::table::beginning;

/// Content of the second cell of a double-width character.
const CONTINUED: char = '\0';
/// Characters for a cell of a bar, by eighths filled from below.
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A part of the screen, in cells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Area {
    /// The column of its left edge.
    pub left: usize,
    /// The line of its upper edge.
    pub top: usize,
    /// Width in columns.
    pub width: usize,
    /// Height in lines.
    pub height: usize,
}

impl Area {
    /// Takes at most `height` lines off the upper edge.
    pub fn take_lines(&mut self, height: usize) -> Self {
        let taken = Self { height: height.min(self.height), ..*self };
        (self.top, self.height) = (self.top + taken.height, self.height - taken.height);
        taken
    }

    /// Divides the area into `N` columns of equal width; the last one also gets the remainder.
    pub fn columns<const N: usize>(self) -> [Self; N] {
        let width = self.width / N;
        std::array::from_fn(|index| {
            let left = width * index;
            let width = if index + 1 == N { self.width - left } else { width };
            Self { left: self.left + left, width, ..self }
        })
    }

    /// An area of at most this size in the middle.
    pub fn center(self, width: usize, height: usize) -> Self {
        let (width, height) = (width.min(self.width), height.min(self.height));
        let (left, top) = ((self.width - width) / 2, (self.height - height) / 2);
        Self { left: self.left + left, top: self.top + top, width, height }
    }

    /// The area within a border.
    fn inner(self) -> Self {
        let (width, height) = (self.width.saturating_sub(2), self.height.saturating_sub(2));
        Self { left: self.left + 1, top: self.top + 1, width, height }
    }
}

/// The cells of a screen.
#[derive(Clone)]
pub struct Canvas {
    area: Area,
    /// The character and the style of each cell, line by line.
    cells: Vec<(char, ContentStyle)>,
}

impl Canvas {
    /// An empty screen.
    pub fn new(width: usize, height: usize) -> Self {
        let cells = vec![(' ', ContentStyle::new()); width * height];
        Self { area: Area { width, height, ..Area::default() }, cells }
    }

    /// The whole screen.
    pub fn area(&self) -> Area {
        self.area
    }

    /// Draws a text at the beginning of a line of an area; blanks in its style fill the line.
    pub fn text(&mut self, area: Area, line: usize, text: &str, style: ContentStyle) {
        if line < area.height {
            let blank = std::iter::repeat(' ');
            let mut column = 0;
            for char in text.chars().chain(blank) {
                let width = char.width().unwrap_or(0);
                if column >= area.width {
                    break;
                }
                // A wide character at the end of the line is left out: half of it would be outside.
                let (char, width) =
                    if column + width > area.width { (' ', 1) } else { (char, width) };
                if width > 0 {
                    self.put(area, (column, line), char, style);
                }
                if width == 2 {
                    self.put(area, (column + 1, line), CONTINUED, style);
                }
                column += width;
            }
        }
    }

    /// Clears an area, draws its border with a title, and returns the area within.
    pub fn bordered(&mut self, area: Area, title: &str) -> Area {
        let (plain, inner) = (ContentStyle::new(), area.inner());
        if area.width < 2 || area.height < 2 {
            return Area::default();
        }
        let edge = |left: char, line: &str, right: char| {
            let rest = "─".repeat(inner.width.saturating_sub(line.width()));
            format!("{left}{line}{rest}{right}")
        };
        let title: String = beginning(title.chars(), inner.width).collect();
        self.text(area, 0, &edge('┌', &title, '┐'), plain);
        for line in 1..=inner.height {
            self.text(area, line, &format!("│{}│", " ".repeat(inner.width)), plain);
        }
        self.text(area, inner.height + 1, &edge('└', "", '┘'), plain);
        inner
    }

    /// Draws the latest values as bars from left to right, at most one per column. The largest
    /// of these values has the full height.
    pub fn bars(&mut self, area: Area, values: &VecDeque<u64>) {
        let latest = || values.iter().skip(values.len().saturating_sub(area.width));
        let most = u128::from(latest().copied().max().unwrap_or(0).max(1));
        for (column, value) in latest().enumerate() {
            let eighths = u128::from(*value) * area.height as u128 * 8 / most;
            for line in 0..area.height {
                let below = 8 * (area.height - 1 - line);
                let filled = (eighths as usize).saturating_sub(below).min(8);
                self.put(area, (column, line), EIGHTHS[filled], ContentStyle::new().dark_green());
            }
        }
    }

    fn put(&mut self, area: Area, (column, line): (usize, usize), char: char, style: ContentStyle) {
        let (column, line) = (area.left + column, area.top + line);
        if column < self.area.width && line < self.area.height {
            self.cells[line * self.area.width + column] = (char, style);
        }
    }

    /// Writes the lines that differ from `shown`: the terminal's content now, of the same size.
    pub fn show(&self, shown: &Self, out: &mut impl Write) -> io::Result<()> {
        let width = self.area.width.max(1);
        let lines = self.cells.chunks(width).zip(shown.cells.chunks(width)).enumerate();
        for (number, (line, _)) in lines.filter(|(_, (line, shown))| line != shown) {
            queue!(out, MoveTo(0, number as u16))?;
            for run in line.chunk_by(|(_, one), (_, other)| one == other) {
                queue!(out, PrintStyledContent(run[0].1.apply(characters(run))))?;
            }
        }
        Ok(())
    }

    /// The characters, line by line.
    #[cfg(test)]
    pub fn content(&self) -> String {
        self.cells.chunks(self.area.width.max(1)).map(characters).collect::<Vec<_>>().join("\n")
    }
}

/// The characters of adjacent cells.
fn characters(cells: &[(char, ContentStyle)]) -> String {
    cells.iter().map(|(char, _)| *char).filter(|char| *char != CONTINUED).collect()
}

/// Divides a text into lines of at most `width` characters, at spaces where possible.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let width = width.max(1);
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        let used = lines.last().map_or(0, |line| line.chars().count());
        if used > 0 && used + 1 + word.len() > width {
            lines.push(String::new());
        } else if used > 0 {
            word.insert(0, ' ');
        }
        for (index, piece) in word.chunks(width).enumerate() {
            if index > 0 {
                lines.push(String::new());
            }
            lines.last_mut().expect("there is a line").extend(piece);
        }
    }
    lines
}
