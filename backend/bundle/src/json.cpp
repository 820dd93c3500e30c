#include "json.h"

#include "error.h"
#include "utf8.h"

#include <charconv>
#include <system_error>
#include <unordered_set>

namespace nk {

namespace {

constexpr int MAX_DEPTH = 16;

const char * kind_name(json::kind_t kind) {
    static const char * const NAMES[] = { "null", "true or false", "a number", "a string", "an array", "an object" };
    return NAMES[kind];
}

void append_utf8(std::string & out, uint32_t code) {
    const auto add = [&](uint32_t byte) {
        out += static_cast<char>(byte);
    };
    if (code < 0x80) {
        add(code);
    } else if (code < 0x800) {
        add(0xC0 | code >> 6);
        add(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        add(0xE0 | code >> 12);
        add(0x80 | (code >> 6 & 0x3F));
        add(0x80 | (code & 0x3F));
    } else {
        add(0xF0 | code >> 18);
        add(0x80 | (code >> 12 & 0x3F));
        add(0x80 | (code >> 6 & 0x3F));
        add(0x80 | (code & 0x3F));
    }
}

class parser {
  public:
    explicit parser(std::string_view text) : text(text) {}

    json parse() {
        at = utf8_length(text);
        if (at != text.size()) {
            wrong("not UTF-8");
        }
        at         = 0;
        json value = read_value(0);
        skip_space();
        if (at != text.size()) {
            wrong("more after the end");
        }
        return value;
    }

  private:
    std::string_view text;
    size_t           at = 0;

    [[noreturn]] void wrong(const char * what) const {
        fail(NEURON_KERNELS_ERROR_CORRUPT, "no JSON: %s at byte %zu", what, at);
    }

    // Returns NUL at the end; JSON has a NUL nowhere else.
    char next() const { return at < text.size() ? text[at] : '\0'; }

    bool take(std::string_view expected) {
        if (text.substr(at, expected.size()) != expected) {
            return false;
        }
        at += expected.size();
        return true;
    }

    void skip_space() {
        while (next() == ' ' || next() == '\t' || next() == '\r' || next() == '\n') {
            at++;
        }
    }

    // Takes a character, after any white space.
    bool take_mark(char mark) {
        skip_space();
        return take({ &mark, 1 });
    }

    json read_value(int depth) {
        if (depth > MAX_DEPTH) {
            wrong("nested too deep");
        }
        skip_space();
        json value;
        value.at = at;
        if (take("{")) {
            read_members(value, depth);
        } else if (take("[")) {
            read_items(value, depth);
        } else if (next() == '"') {
            value.kind = json::STRING;
            value.text = read_string();
        } else if (take("true")) {
            value.kind  = json::BOOL;
            value.truth = true;
        } else if (take("false")) {
            value.kind = json::BOOL;
        } else if (!take("null")) {
            value.kind = json::NUMBER;
            value.text = read_number();
        }
        return value;
    }

    void read_members(json & object, int depth) {
        object.kind = json::OBJECT;
        if (take_mark('}')) {
            return;
        }
        do {
            skip_space();
            std::string name = read_string();
            if (!take_mark(':')) {
                wrong("':' expected");
            }
            object.members.emplace_back(std::move(name), read_value(depth + 1));
        } while (take_mark(','));
        if (!take_mark('}')) {
            wrong("',' or '}' expected");
        }
        std::unordered_set<std::string_view> names;
        for (const auto & [name, value] : object.members) {
            if (!names.insert(name).second) {
                at = value.at;
                wrong(("the second member " + quoted(name)).c_str());
            }
        }
    }

    void read_items(json & array, int depth) {
        array.kind = json::ARRAY;
        if (take_mark(']')) {
            return;
        }
        do {
            array.items.push_back(read_value(depth + 1));
        } while (take_mark(','));
        if (!take_mark(']')) {
            wrong("',' or ']' expected");
        }
    }

    // Takes digits; returns their number.
    size_t digits() {
        const size_t start = at;
        while (next() >= '0' && next() <= '9') {
            at++;
        }
        return at - start;
    }

    std::string read_number() {
        const size_t start = at;
        take("-");
        const bool whole = take("0") || digits() > 0;
        const bool part  = !take(".") || digits() > 0;
        bool       power = true;
        if (take("e") || take("E")) {
            take("+") || take("-");
            power = digits() > 0;
        }
        if (!whole || !part || !power) {
            wrong("a value expected");
        }
        return std::string(text.substr(start, at - start));
    }

    std::string read_string() {
        if (!take("\"")) {
            wrong("a string expected");
        }
        std::string value;
        while (!take("\"")) {
            const char c = next();
            if (static_cast<unsigned char>(c) < ' ') {
                wrong(at < text.size() ? "a control character" : "a string without an end");
            }
            at++;
            if (c == '\\') {
                read_escape(value);
            } else {
                value += c;
            }
        }
        return value;
    }

    void read_escape(std::string & out) {
        constexpr std::string_view CODES = "\"\\/bfnrt";
        constexpr std::string_view MEANS = "\"\\/\b\f\n\r\t";

        if (take("u")) {
            append_utf8(out, read_code());
            return;
        }
        const size_t found = CODES.find(next());
        if (found == std::string_view::npos) {
            wrong("an unknown escape");
        }
        out += MEANS[found];
        at++;
    }

    // Reads the code after \u, and the second half of a UTF-16 pair.
    uint32_t read_code() {
        const uint32_t first = read_hex();
        if (first == 0) {
            wrong("a NUL");
        }
        if (first < 0xD800 || first > 0xDFFF) {
            return first;
        }
        const uint32_t second = first < 0xDC00 && take("\\u") ? read_hex() : 0;
        if (second < 0xDC00 || second > 0xDFFF) {
            wrong("half a character");
        }
        return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
    }

    uint32_t read_hex() {
        const std::string_view four = text.substr(at, 4);
        const char * const     end  = four.data() + four.size();
        uint32_t               code = 0;
        if (four.size() != 4 || std::from_chars(four.data(), end, code, 16).ptr != end) {
            wrong("four hexadecimal digits expected");
        }
        at += 4;
        return code;
    }
};

}  // namespace

const json & json::get(const char * name, kind_t wanted) const {
    for (const auto & [key, value] : members) {
        if (key != name) {
            continue;
        }
        if (value.kind != wanted) {
            fail(NEURON_KERNELS_ERROR_CORRUPT, "'%s' at byte %zu is %s; expected %s", name, value.at,
                 kind_name(value.kind), kind_name(wanted));
        }
        return value;
    }
    fail(NEURON_KERNELS_ERROR_CORRUPT, "'%s' is missing in %s at byte %zu", name, kind_name(kind), at);
}

bool json::boolean(const char * name) const {
    return get(name, BOOL).truth;
}

uint64_t json::count(const char * name, uint64_t max) const {
    const json &       value  = get(name, NUMBER);
    const char * const end    = value.text.data() + value.text.size();
    uint64_t           number = 0;
    const auto         read   = std::from_chars(value.text.data(), end, number);
    if (read.ec != std::errc() || read.ptr != end || number > max) {
        fail(NEURON_KERNELS_ERROR_CORRUPT, "'%s' at byte %zu is %s; expected a count", name, value.at,
             quoted(value.text).c_str());
    }
    return number;
}

const std::string & json::string(const char * name) const {
    return get(name, STRING).text;
}

json json_read(std::string_view text) {
    return parser(text).parse();
}

}  // namespace nk
