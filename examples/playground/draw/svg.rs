//! The few SVG elements of a picture.

/// Colors with enough contrast on white and on dark pages, which color-blind readers can
/// distinguish.
pub(crate) const ADMITTED: &str = "#3a8bd0";
pub(crate) const REFUSED: &str = "#de691e";
pub(crate) const DELAYED: &str = "#9a6ed4";
pub(crate) const REMAINING: &str = "#2f9b7b";

/// A part of a picture. The class of an element lets the page choose other colors.
#[derive(Default)]
pub(crate) struct Svg(String);

#[derive(Clone, Copy)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    /// Draws the outline of a path. Does nothing if the path is empty.
    pub(crate) fn path(&mut self, d: &str, class: &str, color: &str, style: &str) {
        if !d.is_empty() {
            self.line(&format!("<path class=\"{class}\" fill=\"none\" stroke=\"{color}\" {style} d=\"{d}\"/>"));
        }
    }

    pub(crate) fn area(&mut self, d: &str, class: &str, color: &str) {
        self.line(&format!("<path class=\"{class}-area\" fill=\"{color}\" fill-opacity=\".16\" d=\"{d}\"/>"));
    }

    pub(crate) fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let text = escaped(text);
        self.line(&format!("<text x=\"{x:.1}\" y=\"{y:.1}\"{anchor} fill-opacity=\".8\">{text}</text>"));
    }

    pub(crate) fn append(&mut self, other: &Self) {
        self.0 += &other.0;
    }

    pub(crate) fn into_text(self) -> String {
        self.0
    }

    fn line(&mut self, line: &str) {
        self.0 += line;
        self.0.push('\n');
    }
}

pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
