// Style and script of the HTML report. Bins and colours: every step keeps a text contrast of at
// least 4.5 : 1 (WCAG AA) in light and dark, which tests/python/test_report.py computes.
#pragma once

#include <string_view>

namespace lmhead::tools {

inline constexpr std::string_view kReportStyle = R"css(
:root{color-scheme:light dark;--page:#ffffff;--ink:#1b1d21;--soft:#5a606b;--line:#d9dce2;--card:#f5f6f8;--focus:#0b57d0;
--s1:#fff1dd;--s2:#ffe2bd;--s3:#ffce92;--s4:#ffb260;--s5:#f78f37;--s6:#e2701c;--s7:#9c3a05;
--s1i:#1b1d21;--s2i:#1b1d21;--s3i:#1b1d21;--s4i:#1b1d21;--s5i:#1b1d21;--s6i:#1b1d21;--s7i:#ffffff;
--e1:#eaf2fd;--e2:#d2e4fb;--e3:#b0cff6;--e4:#86b5ef;--e5:#5a96e6;--e6:#2c66c2;--e7:#153f87;
--e1i:#1b1d21;--e2i:#1b1d21;--e3i:#1b1d21;--e4i:#1b1d21;--e5i:#1b1d21;--e6i:#ffffff;--e7i:#ffffff}
@media (prefers-color-scheme:dark){:root{--page:#14161a;--ink:#e7e9ee;--soft:#a2a9b6;--line:#343943;--card:#1d2026;--focus:#8ab4f8;
--s1:#2d2013;--s2:#452c13;--s3:#603a12;--s4:#7f4a10;--s5:#a0590b;--s6:#e18c33;--s7:#ffbd73;
--s1i:#e7e9ee;--s2i:#e7e9ee;--s3i:#e7e9ee;--s4i:#ffffff;--s5i:#ffffff;--s6i:#14161a;--s7i:#14161a;
--e1:#15212f;--e2:#182d46;--e3:#1c3c61;--e4:#234f81;--e5:#2d66a6;--e6:#6ba4e8;--e7:#aacef8;
--e1i:#e7e9ee;--e2i:#e7e9ee;--e3i:#e7e9ee;--e4i:#ffffff;--e5i:#ffffff;--e6i:#14161a;--e7i:#14161a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:66rem;padding:1.5rem 1.25rem 6rem;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
h1{font-size:1.45rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}h3{font-size:.95rem;margin:1.6rem 0 .4rem}
h3 small{font-weight:400;color:var(--soft);font-size:.85rem}
p{margin:.4rem 0}.soft{color:var(--soft);font-size:.9rem;overflow-wrap:anywhere}
a{color:var(--focus)}
dl.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.75rem;margin:1.1rem 0}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.6rem .8rem}
.tiles dt{color:var(--soft);font-size:.82rem}.tiles dd{margin:0;font-size:1.35rem;font-variant-numeric:tabular-nums}
.tiles small{color:var(--soft);font-size:.8rem}
.wrap{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);font-size:.85rem;padding-bottom:.3rem}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child,th:last-child,td:last-child{text-align:left}
thead th{color:var(--soft);font-weight:600}
tfoot td,tfoot th{font-weight:600;border-bottom:0}
.bar{display:inline-block;height:.6rem;width:6rem;margin-right:.5rem;border-radius:3px;vertical-align:baseline;
background:linear-gradient(var(--c) 0 0) left/var(--w) 100% no-repeat var(--card)}
code,.tok{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.88em;white-space:pre}
.bar-top{position:sticky;top:0;z-index:1;background:var(--page);border-bottom:1px solid var(--line);padding:.6rem 0;
display:flex;flex-wrap:wrap;gap:.4rem 1.4rem;align-items:center}
fieldset{border:0;padding:0;margin:0;display:flex;gap:.9rem;align-items:center}
legend{float:left;padding:0;margin-right:.2rem;color:var(--soft);font-size:.9rem}
label{cursor:pointer}
.scale{display:flex;flex-wrap:wrap;list-style:none;margin:0;padding:0;font-size:.78rem;font-variant-numeric:tabular-nums}
.scale li{padding:.1rem .5rem;min-width:3.2rem;white-space:nowrap;text-align:center;border:1px solid var(--line);border-left-width:0}
.scale li:first-child{border-left-width:1px;border-radius:5px 0 0 5px}.scale li:last-child{border-radius:0 5px 5px 0}
.text{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.85;padding:.7rem .9rem;border:1px solid var(--line);border-radius:8px}
.text:focus-visible,input:focus-visible,a:focus-visible{outline:2px solid var(--focus);outline-offset:2px}
.text span{border-radius:3px;padding:.12em 0}
.text .u{color:var(--soft);text-decoration:underline dotted}
.text .at{outline:2px solid var(--focus);outline-offset:1px}
.eol{color:var(--soft);font-size:.75em;user-select:none}
#detail{position:fixed;left:0;right:0;bottom:0;background:var(--card);border-top:1px solid var(--line);
padding:.5rem 1.25rem;font-size:.9rem;font-variant-numeric:tabular-nums}
#detail:empty{display:none}
)css"
                                                 R"css(
body:has(#by-s:checked) .s1{background:var(--s1);color:var(--s1i)}body:has(#by-s:checked) .s2{background:var(--s2);color:var(--s2i)}
body:has(#by-s:checked) .s3{background:var(--s3);color:var(--s3i)}body:has(#by-s:checked) .s4{background:var(--s4);color:var(--s4i)}
body:has(#by-s:checked) .s5{background:var(--s5);color:var(--s5i)}body:has(#by-s:checked) .s6{background:var(--s6);color:var(--s6i)}
body:has(#by-s:checked) .s7{background:var(--s7);color:var(--s7i)}
body:has(#by-e:checked) .e1{background:var(--e1);color:var(--e1i)}body:has(#by-e:checked) .e2{background:var(--e2);color:var(--e2i)}
body:has(#by-e:checked) .e3{background:var(--e3);color:var(--e3i)}body:has(#by-e:checked) .e4{background:var(--e4);color:var(--e4i)}
body:has(#by-e:checked) .e5{background:var(--e5);color:var(--e5i)}body:has(#by-e:checked) .e6{background:var(--e6);color:var(--e6i)}
body:has(#by-e:checked) .e7{background:var(--e7);color:var(--e7i)}
@media (prefers-reduced-motion:no-preference){html{scroll-behavior:smooth}}
@media print{#detail,.bar-top{position:static}body{padding-bottom:0}*{print-color-adjust:exact}}
)css";

// Shows the token under the pointer, or the one reached with the arrow keys, in the line at the
// bottom. Without a script every token still has its tooltip.
inline constexpr std::string_view kReportScript = R"js(
const detail=document.getElementById('detail');let at=null;
function show(t){if(at)at.classList.remove('at');at=t;t.classList.add('at');
detail.textContent='\u201c'+t.textContent+'\u201d  '+t.title;}
document.addEventListener('mouseover',e=>{const t=e.target.closest('.text span[title]');if(t)show(t);});
for(const box of document.querySelectorAll('.text'))box.addEventListener('keydown',e=>{
const step={ArrowRight:1,ArrowLeft:-1}[e.key];if(!step)return;e.preventDefault();
const all=[...box.querySelectorAll('span[title]')];if(!all.length)return;
const i=at&&box.contains(at)?all.indexOf(at)+step:step>0?0:all.length-1;
const t=all[Math.max(0,Math.min(all.length-1,i))];show(t);t.scrollIntoView({block:'nearest'});});
)js";

}  // namespace lmhead::tools
