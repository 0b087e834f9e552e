#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "report_page.h"

namespace lmhead::tools {
namespace {

// A page of more tokens than this no longer opens well in a browser; the table still covers all.
constexpr std::int64_t kMaxTokens = 200'000;
// Bin b holds values in [kEdges[b - 1], kEdges[b]) nats. One scale for both, so that they compare.
constexpr std::array<double, 7> kEdges = {0.25, 1, 2, 3, 4.5, 6.5, 9};

int bin(double nats) { return static_cast<int>(std::upper_bound(kEdges.begin(), kEdges.end(), nats) - kEdges.begin()); }

std::string escape(std::string_view text) {
  std::string out;
  for (const char c : text) switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\n': out += "<b class=eol aria-hidden=true>\u21b5</b>\n"; break;
      // HTML has no way to write the other control characters; show the Unicode control pictures.
      default:
        if (static_cast<unsigned char>(c) < 0x20 && c != '\t') {
          out += "\xe2\x90";
          out += static_cast<char>(0x80 + c);
        } else {
          out += c;
        }
    }
  return out;
}

std::string without_leading_spaces(const std::string& text) {
  return text.substr(std::min(text.find_first_not_of(' '), text.size()));
}

std::string number(const std::optional<double>& value, int digits) {
  return value ? fmt::format("{:.{}f}", *value, digits) : "\u2013";
}

std::optional<double> surprisal(const Figures& f) {
  return f.mean_logprob ? std::optional<double>(-*f.mean_logprob) : std::nullopt;
}

struct Page {
  const Batch& batch;
  const Scores& scores;
  const std::vector<std::string>& tokens;
  std::string out;

  std::string text(std::int64_t i) const {
    return tokens.empty() ? fmt::format("#{} ", batch.ids[i]) : tokens[static_cast<std::size_t>(i)];
  }

  /// The row whose result belongs to id i of sequence [begin, end), or -1.
  std::int64_t row_of(std::int64_t i, std::int64_t begin) const {
    const std::int64_t row = batch.shifted ? i - 1 : i;
    return row < begin || batch.targets[row] == kIgnoreIndex ? -1 : row;
  }
  /// The id that a row scores.
  std::int64_t id_of(std::int64_t row) const { return batch.shifted ? row + 1 : row; }

  void token(std::int64_t i, std::int64_t begin) {
    const std::int64_t row = row_of(i, begin);
    if (row < 0) {
      out += fmt::format("<span class=u>{}</span>", escape(text(i)));
      return;
    }
    const double s = -static_cast<double>(scores.logprob[row]), e = scores.entropy[row];
    out += fmt::format("<span class=\"s{} e{}\" title=\"surprisal {:.3f}, entropy {:.3f}, row {}, id {}\">{}</span>",
                       bin(s), bin(e), s, e, row, batch.ids[i], escape(text(i)));
  }

  void tile(const char* name, const std::string& value, const std::string& unit) {
    out += fmt::format("<div><dt>{}</dt><dd>{} <small>{}</small></dd></div>", name, value, unit);
  }

  void head() {
    const Figures& f = scores.total;
    out += fmt::format("<h1>Token scores</h1>\n<p class=soft>{} under {} [{}, {}] {} of {}</p>\n<dl class=tiles>",
                       escape(scores.batch), escape(scores.tensor), scores.vocab, scores.width, scores.weight_dtype,
                       escape(scores.model));
    tile("Scored", std::to_string(f.scored), fmt::format("of {} tokens", f.rows));
    tile("Mean surprisal", number(surprisal(f), 3), "nats");
    tile("Perplexity", number(f.perplexity, 2), "");
    tile("Mean entropy", number(f.mean_entropy, 3), "nats");
    out += "</dl>\n";
  }

  std::string bar(const std::optional<double>& value, double most, char ramp) const {
    if (!value) return number(value, 3);
    return fmt::format("<span class=bar style=\"--w:{:.1f}%;--c:var(--{}5)\"></span>{:.3f}",
                       most > 0 ? std::clamp(100 * *value / most, 0.0, 100.0) : 0.0, ramp, *value);
  }

  void table() {
    double most = 0;
    for (const Figures& f : scores.sequences)
      most = std::max({most, surprisal(f).value_or(0), f.mean_entropy.value_or(0)});
    out +=
        "<h2 id=summary>Sequences</h2>\n<div class=wrap><table><caption>Means over the scored tokens, in nats"
        "</caption><thead><tr><th scope=col>sequence<th scope=col>tokens<th scope=col>scored<th scope=col>mean "
        "surprisal"
        "<th scope=col>perplexity<th scope=col>mean entropy<th scope=col>most surprising token</tr></thead><tbody>\n";
    for (std::size_t s = 0; s < scores.sequences.size(); ++s) {
      const Figures& f = scores.sequences[s];
      std::string least = "\u2013";
      if (f.least_row)
        least = fmt::format("<span class=tok>{}</span> {:.2f}",
                            escape(without_leading_spaces(text(id_of(*f.least_row)))), -scores.logprob[*f.least_row]);
      const bool shown = batch.cu_seqlens[s] < kMaxTokens;
      out += fmt::format("<tr><th scope=row>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}</tr>\n",
                         shown ? fmt::format("<a href=\"#q{}\">{}</a>", s, s) : std::to_string(s), f.rows, f.scored,
                         bar(surprisal(f), most, 's'), number(f.perplexity, 2), bar(f.mean_entropy, most, 'e'), least);
    }
    const Figures& f = scores.total;
    out += fmt::format(
        "</tbody><tfoot><tr><th scope=row>all<td>{}<td>{}<td>{}<td>{}<td>{}<td></tr></tfoot></table></div>\n", f.rows,
        f.scored, number(surprisal(f), 3), number(f.perplexity, 2), number(f.mean_entropy, 3));
  }

  void controls() {
    out +=
        "<h2>Text</h2>\n<div class=bar-top><fieldset><legend>Colour by</legend>"
        "<label><input type=radio name=by id=by-s checked> surprisal</label>"
        "<label><input type=radio name=by id=by-e> entropy</label></fieldset><ol class=scale aria-label=\"Legend, "
        "nats\">";
    for (std::size_t b = 0; b <= kEdges.size(); ++b) {
      const std::string range = b == 0               ? fmt::format("&lt; {}", kEdges[0])
                                : b == kEdges.size() ? fmt::format("\u2265 {}", kEdges[b - 1])
                                                     : fmt::format("{}\u2013{}", kEdges[b - 1], kEdges[b]);
      out += fmt::format("<li class=\"s{} e{}\">{}</li>", b, b, range);
    }
    out +=
        "</ol><span class=soft>nats; dotted: not scored</span></div>\n"
        "<p class=soft>Surprisal is \u2212log p of the token, entropy that of the distribution it was drawn from. "
        "Point at a "
        "token, or focus a text and use the arrow keys.</p>\n";
  }

  void texts() {
    for (std::size_t s = 0; s < scores.sequences.size(); ++s) {
      const std::int64_t begin = batch.cu_seqlens[s], end = std::min(batch.cu_seqlens[s + 1], kMaxTokens);
      if (begin >= kMaxTokens) break;
      const Figures& f = scores.sequences[s];
      out += fmt::format(
          "<h3 id=q{}>Sequence {} <small>{} tokens, mean surprisal {}, mean entropy {}</small></h3>\n"
          "<div class=text tabindex=0 role=group aria-label=\"Text of sequence {}\">",
          s, s, f.rows, number(surprisal(f), 3), number(f.mean_entropy, 3), s);
      for (std::int64_t i = begin; i < end; ++i) token(i, begin);
      out += "</div>\n";
    }
    if (batch.rows() > kMaxTokens)
      out +=
          fmt::format("<p><strong>Only the first {} of {} tokens are shown.</strong></p>\n", kMaxTokens, batch.rows());
  }

  void foot() {
    out += fmt::format(
        "<p class=soft>Temperature {}, soft cap {}, logit scale {}. lmhead {}, backend {}, {} threads, {:.3f} s.</p>\n"
        "<div id=detail aria-live=polite></div>\n",
        scores.temperature, scores.softcap ? fmt::format("{}", *scores.softcap) : "none", scores.logit_scale,
        scores.version, scores.backend, scores.threads, scores.seconds);
  }
};

}  // namespace

std::vector<std::string> read_tokens(const std::string& path, std::int64_t rows) {
  std::ifstream file(path);
  if (!file || std::filesystem::is_directory(path)) throw bad_input(path + ": cannot read it");
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(file);
  } catch (const nlohmann::json::exception&) {
    throw bad_input(path + ": expected a JSON list of strings");
  }
  if (!json.is_array() || static_cast<std::int64_t>(json.size()) != rows)
    throw bad_input(fmt::format("{}: expected a list of {} strings (the rows of hidden), got {}", path, rows,
                                json.is_array() ? std::to_string(json.size()) : json.type_name()));
  std::vector<std::string> tokens;
  for (const auto& token : json) {
    if (!token.is_string())
      throw bad_input(fmt::format("{}: expected strings, got {} at {}", path, token.dump(), tokens.size()));
    tokens.push_back(token.get<std::string>());
  }
  return tokens;
}

std::string render_report(const Batch& batch, const Scores& scores, const std::vector<std::string>& tokens) {
  Page page{batch, scores, tokens, {}};
  page.out = fmt::format(
      "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n<meta name=viewport "
      "content=\"width=device-width,initial-scale=1\">\n<title>Token scores: "
      "{}</title>\n<style>{}</style>\n</head>\n<body>\n",
      escape(scores.batch), kReportStyle);
  page.head();
  page.table();
  page.controls();
  page.texts();
  page.foot();
  page.out += fmt::format("<script>{}</script>\n</body>\n</html>\n", kReportScript);
  return page.out;
}

}  // namespace lmhead::tools
