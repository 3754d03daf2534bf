// Reads PTX text.
#include "text.h"

#include <cctype>
#include <cstring>

namespace ptx {
namespace {

const char* const SPECIAL[SPECIALS] = {
    "%tid.x",   "%tid.y",   "%tid.z",    "%ntid.x",   "%ntid.y",   "%ntid.z", "%ctaid.x",
    "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid"};

struct Token {
    std::string text;
    int line;
};

bool in_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("_$%.", c);
}

std::vector<Token> tokens_of(const std::string& text) {
    std::vector<Token> found;
    int line = 1;
    for (size_t i = 0; i < text.size();) {
        const char c = text[i];
        size_t end = i + 1;
        if (c == '\n') ++line;
        if (std::isspace(static_cast<unsigned char>(c))) {
        } else if (text.compare(i, 2, "//") == 0) {
            end = std::min(text.find('\n', i), text.size());
        } else if (c == '"') {
            end = text.find('"', i + 1) + 1;
            if (!end) throw Error("a string without an end");
            found.push_back({text.substr(i, end - i), line});
        } else {
            // "::" belongs to a word ("shared::cta"), ":" ends a label.
            while (in_word(c) && end < text.size() &&
                   (in_word(text[end]) || text.compare(end, 2, "::") == 0))
                end += text[end] == ':' ? 2 : 1;
            found.push_back({text.substr(i, end - i), line});
        }
        i = end;
    }
    return found;
}

class Parser {
public:
    explicit Parser(const std::string& text) : tokens_(tokens_of(text)) {}

    ModuleText module() {
        ModuleText found;
        while (at_ < tokens_.size()) {
            const std::string word = next();
            if (word == ".version" || word == ".address_size") {
                next();
            } else if (word == ".target") {
                found.target = next();
            } else if (word == ".global" || word == ".shared" || word == ".const") {
                found.variables.push_back(variable(space_of(word)));
            } else if (word == ".entry") {
                found.kernels.push_back(kernel());
            } else if (word != ".visible" && word != ".extern" && word != ".weak") {
                fail("unknown directive " + word);
            }
        }
        return found;
    }

private:
    std::vector<Token> tokens_;
    size_t at_ = 0;
    KernelText* kernel_ = nullptr;
    std::vector<std::map<std::string, int>> scopes_;  // name of a register -> slot

    [[noreturn]] void fail(const std::string& what) const {
        const int line = at_ ? tokens_[std::min(at_, tokens_.size()) - 1].line : 1;
        throw Error("line " + std::to_string(line) + ": " + what);
    }
    const std::string& peek() const {
        if (at_ >= tokens_.size()) fail("the text ends early");
        return tokens_[at_].text;
    }
    std::string next() {
        const std::string word = peek();
        ++at_;
        return word;
    }
    bool take(const std::string& word) {
        const bool there = at_ < tokens_.size() && tokens_[at_].text == word;
        at_ += there;
        return there;
    }
    void expect(const std::string& word) {
        const std::string found = next();
        if (found != word) fail("expected " + word + ", found " + found);
    }

    Space space_of(const std::string& word) const {
        if (word == ".global" || word == ".const") return Space::GLOBAL;
        if (word == ".shared") return Space::SHARED;
        if (word == ".local") return Space::LOCAL;
        if (word == ".param") return Space::PARAM;
        fail("unknown space " + word);
    }

    // Behind the space: [.align n] .type name [[size]] [= values], up to ";" if it is no parameter.
    Variable variable(Space space) {
        Variable found;
        found.space = space;
        if (take(".align")) found.align = number();
        const std::string type = next();
        const uint64_t size = std::stoul(type.substr(2)) / 8;
        found.align = std::max(found.align, size);
        found.name = next();
        found.bytes = size;
        if (take("[")) {
            found.dynamic = take("]");
            found.bytes = found.dynamic ? 0 : size * number();
            if (!found.dynamic) expect("]");
        }
        found.content.resize(found.bytes);
        if (take("=")) {
            const bool several = take("{");
            size_t to = 0;
            do {
                const uint64_t value = number();
                if (to + size > found.bytes) fail("too many values for " + found.name);
                std::memcpy(found.content.data() + to, &value, size);
                to += size;
            } while (take(","));
            if (several) expect("}");
        }
        if (space != Space::PARAM) expect(";");
        return found;
    }

    uint64_t number() {
        const bool negative = take("-");
        const std::string word = next();
        try {
            size_t used = 0;
            const bool bits =
                word.size() > 2 && (word[1] == 'f' || word[1] == 'd') && word[0] == '0';
            const std::string digits = bits ? word.substr(2) : word;
            const uint64_t value = std::stoull(digits, &used, bits ? 16 : 0);
            if (used != digits.size() && digits.substr(used) != "U") fail("no number: " + word);
            return negative ? -value : value;
        } catch (const std::logic_error&) {
            fail("no number: " + word);
        }
    }

    KernelText kernel() {
        KernelText found;
        kernel_ = &found;
        scopes_.assign(1, {});
        for (const char* name : SPECIAL) declare(name, 32);
        found.name = next();
        if (take("(")) {
            while (!take(")")) {
                expect(".param");
                found.parameters.push_back(variable(Space::PARAM));
                take(",");
            }
        }
        while (!take("{")) {
            const std::string word = next();
            const bool most = word == ".maxntid" || word == ".reqntid";
            if (!most && word != ".minnctapersm") fail("unknown directive " + word);
            int place = 0;
            do {
                const int value = static_cast<int>(number());
                if (most && place < 3) found.threads[place] = value;
                ++place;
            } while (take(","));
        }
        body();
        kernel_ = nullptr;
        return found;
    }

    int declare(const std::string& name, int bits) {
        const int slot = static_cast<int>(kernel_->registers.size());
        kernel_->registers.push_back({name, bits});
        scopes_.back()[name] = slot;
        return slot;
    }

    void registers() {
        const std::string type = next();
        const int bits = type == ".pred" ? 1 : std::stoi(type.substr(2));
        do {
            const std::string name = next();
            if (take("<")) {
                const uint64_t count = number();
                expect(">");
                for (uint64_t i = 0; i < count; ++i) declare(name + std::to_string(i), bits);
            } else {
                declare(name, bits);
            }
        } while (take(","));
        expect(";");
    }

    void body() {
        while (true) {
            if (take("}")) {
                scopes_.pop_back();
                if (scopes_.empty()) return;
            } else if (take("{")) {
                scopes_.push_back({});
            } else if (take(";")) {
            } else if (take(".reg")) {
                registers();
            } else if (peek() == ".shared" || peek() == ".local") {
                kernel_->variables.push_back(variable(space_of(next())));
            } else if (take(".pragma")) {
                next(), expect(";");
            } else if (tokens_.at(at_ + 1).text == ":") {
                kernel_->labels[next()] = static_cast<int>(kernel_->statements.size());
                expect(":");
            } else {
                kernel_->statements.push_back(statement());
            }
        }
    }

    Statement statement() {
        Statement found;
        const size_t first = at_;
        found.line = tokens_[at_].line;
        if (take("@")) {
            found.negated = take("!");
            found.guard = register_named(next());
        }
        found.opcode = next();
        if (!std::isalpha(static_cast<unsigned char>(found.opcode[0])))
            fail("expected an instruction, found " + found.opcode);
        while (!take(";")) {
            found.operands.push_back(operand());
            if (peek() != ";") expect(",");
        }
        for (size_t i = first; i + 1 < at_; ++i) {
            const std::string& word = tokens_[i].text;
            const bool apart = i > first && in_word(word[0]) && in_word(tokens_[i - 1].text[0]);
            found.text += (apart ? " " : "") + word + (word == "," ? " " : "");
        }
        return found;
    }

    int find(const std::string& name) const {
        for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
            const auto place = scope->find(name);
            if (place != scope->end()) return place->second;
        }
        return -1;
    }
    int register_named(const std::string& name) const {
        const int slot = find(name);
        if (slot < 0) fail("unknown register " + name);
        return slot;
    }

    Operand operand() {
        Operand found;
        if (take("{")) {
            found.kind = Operand::VECTOR;
            do found.parts.push_back(operand());
            while (take(","));
            expect("}");
        } else if (take("[")) {
            found = operand();
            if (found.kind == Operand::NUMBER) {  // an absolute address
            } else if (take("+")) {
                found.number = number();
            } else if (peek() == "-") {
                found.number = number();
            }
            expect("]");
            found.kind = Operand::ADDRESS;
        } else if (take("!")) {
            found = operand();
            found.negated = true;
        } else if (peek() == "-" || std::isdigit(static_cast<unsigned char>(peek()[0]))) {
            found.kind = Operand::NUMBER;
            found.is_float = peek().size() > 2 && (peek()[1] == 'f' || peek()[1] == 'd');
            found.number = number();
        } else {
            const std::string name = next();
            found.slot = find(name);
            found.kind = name == "_"       ? Operand::SINK
                         : found.slot >= 0 ? Operand::REGISTER
                                           : Operand::SYMBOL;
            if (found.kind == Operand::SYMBOL) found.symbol = name;
            if (take("|")) found.predicate = register_named(next());
        }
        return found;
    }
};

}  // namespace

ModuleText parse(const std::string& text) { return Parser(text).module(); }

std::vector<std::string> split(const std::string& text, char by) {
    std::vector<std::string> parts(1);
    for (const char c : text) {
        if (c == by)
            parts.emplace_back();
        else
            parts.back() += c;
    }
    return parts;
}

}  // namespace ptx
