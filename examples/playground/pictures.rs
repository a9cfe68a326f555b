//! The pictures of the documentation: each strategy on the same traffic.

use std::fs;
use std::path::Path;

use crate::draw::{self, Bands, escaped};
use crate::promise;
use crate::render::{summary, title};
use crate::setup::{Checked, Setup};
use crate::simulate::{Lane, lanes};

/// The width of the picture of one strategy.
const WIDTH: u32 = 720;
/// The width of each strategy in the picture of all strategies.
const PART: u32 = 440;
/// The height of a title with its two lines.
const TITLE: f64 = 44.0;
const GAP: f64 = 24.0;

/// The text is dark on light screens and light on dark ones. In a page of the documentation, the
/// root is the page, and the text has the color of the page.
const STYLE: &str = "<style>svg:root{color:#1f2328;background:#fff}\
                     @media(prefers-color-scheme:dark){svg:root{color:#e6edf3;background:#0d1117}}</style>";

/// Returns the name and the content of each file.
pub(crate) fn all() -> Vec<(String, String)> {
    let of = |width| Setup { width, ..Setup::default() }.checked().expect("the defaults are valid");
    let (single, part) = (of(WIDTH), of(PART));
    let lanes = lanes(&single);
    let mut files: Vec<(String, String)> = lanes.iter().map(|lane| (name(lane), picture(lane, &single))).collect();
    let sheet = sheet(&lanes, &part);
    files.push(("definitions.md".to_owned(), format!("[strategies]: <{}>\n", data_url(&sheet))));
    files.push(("strategies.svg".to_owned(), sheet));
    files
}

fn name(lane: &Lane) -> String {
    format!("{}.svg", lane.policy.limits()[0].strategy().name().replace('-', "_"))
}

pub(crate) fn write(folder: &Path) -> Result<(), String> {
    for (name, content) in all() {
        let file = folder.join(name);
        fs::write(&file, content).map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    }
    Ok(())
}

fn picture(lane: &Lane, setup: &Checked) -> String {
    let part = titled(lane, setup);
    let label = format!("{}: {}", title(lane), summary(lane));
    svg(&label, f64::from(WIDTH), part.height, &part.svg)
}

/// Returns all strategies in two columns.
fn sheet(lanes: &[Lane], setup: &Checked) -> String {
    let mut content = String::new();
    let mut y = GAP / 2.0;
    for row in lanes.chunks(2) {
        let parts: Vec<Bands> = row.iter().map(|lane| titled(lane, setup)).collect();
        for (part, x) in parts.iter().zip([0, PART]) {
            content += &format!("<g transform=\"translate({x} {y:.0})\">\n{}</g>\n", part.svg);
        }
        y += parts.iter().map(|part| part.height).fold(0.0, f64::max) + GAP;
    }
    let label = "All strategies on the same traffic, each with 10 per minute";
    svg(label, f64::from(2 * PART), y, &content)
}

fn titled(lane: &Lane, setup: &Checked) -> Bands {
    let bands = draw::bands(lane, setup);
    let limit = &lane.policy.limits()[0];
    let delayed = match lane.hits.delayed() {
        0 => String::new(),
        delayed => format!(", {delayed} of them late"),
    };
    let counts = format!("{} admitted{delayed}, {} refused", lane.hits.admitted(), lane.hits.refused());
    let svg = format!(
        "<text x=\"30\" y=\"15\" font-size=\"14\" font-weight=\"600\">{}</text>\n\
         <text x=\"{}\" y=\"15\" text-anchor=\"end\">{counts}</text>\n\
         <text x=\"30\" y=\"32\" font-size=\"12\">{}</text>\n\
         <g transform=\"translate(0 {TITLE})\">\n{}</g>\n",
        escaped(&title(lane)),
        setup.width - 8,
        escaped(promise::of(limit).idea),
        bands.svg,
    );
    Bands { svg, height: TITLE + bands.height }
}

/// The opening tag is on a line of its own, and no line is empty, so that Markdown takes the
/// picture as a block of HTML.
fn svg(label: &str, width: f64, height: f64, content: &str) -> String {
    let label = escaped(label);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         style=\"max-width:100%;height:auto\" role=\"img\" aria-label=\"{label}\" fill=\"currentColor\" \
         font-family=\"system-ui,sans-serif\" font-size=\"11\">\n{STYLE}\n{content}</svg>\n"
    )
}

/// Returns the picture as a URL, for pages that cannot load files.
fn data_url(svg: &str) -> String {
    let mut url = "data:image/svg+xml,".to_owned();
    for c in svg.chars() {
        match c {
            '\n' => url.push(' '),
            '"' => url.push('\''),
            '%' | '#' | '<' | '>' => url += &format!("%{:02X}", u32::from(c)),
            c => url.push(c),
        }
    }
    url.replace(' ', "%20")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn pictures_are_current() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src/pictures");
        let files = super::all();
        for (name, content) in &files {
            let stored = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
            assert!(stored == *content, "src/pictures/{name} is stale: run scripts/pictures");
        }
        let stored = std::fs::read_dir(&folder).unwrap().count();
        assert_eq!(stored, files.len(), "src/pictures has a file that no strategy has");
    }

    #[test]
    fn pictures_are_small_and_one_block_of_html() {
        for (name, content) in super::all() {
            let shows_all = ["strategies.svg", "definitions.md"].contains(&&*name);
            let most = if shows_all { 60_000 } else { 15_000 };
            assert!(content.len() < most, "{name} has {} bytes", content.len());
            assert!(!content.contains("\n\n"), "{name} has an empty line");
        }
    }
}
