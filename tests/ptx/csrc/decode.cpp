// Makes instructions of statements. What it does not know is an error that names it.
//
// A new instruction is a line in `makers`, a function of Decoder that takes every modifier and
// operand, and a function in operations.h, or in together.cpp if threads do it together.
#include <algorithm>

#include "operations.h"
#include "together.h"

namespace ptx {
namespace {

struct Type {
    char kind;  // u, s, f, b: bits, h: bfloat16, p: predicate
    int bits;
};

// Calls work with a value of the C++ type.
template <class Work>
Run with_integer(Type type, const Work& work) {
    if (type.kind == 's') {
        if (type.bits == 8) return work(int8_t{});
        if (type.bits == 16) return work(int16_t{});
        return type.bits == 32 ? work(int32_t{}) : work(int64_t{});
    }
    if (type.bits == 8) return work(uint8_t{});
    if (type.bits == 16) return work(uint16_t{});
    return type.bits == 32 ? work(uint32_t{}) : work(uint64_t{});
}
template <class Work>
Run with_float(Type type, const Work& work) {
    return type.bits == 32 ? work(float{}) : work(double{});
}
template <class Work>
Run with_number(Type type, const Work& work) {
    return type.kind == 'f' ? with_float(type, work) : with_integer(type, work);
}

class Decoder {
public:
    Decoder(const KernelText& text, const std::map<std::string, uint64_t>& globals,
            const Tables& tables)
        : text_(text), globals_(globals), kernel_(std::make_unique<Kernel>()) {
        kernel_->name = text.name, kernel_->text = &text, kernel_->tables = &tables;
        for (const Variable& parameter : text.parameters) {
            const uint64_t offset = placed(kernel_->parameter_bytes, parameter);
            kernel_->parameter_offsets.push_back(offset);
            addresses_[parameter.name] = {offset, Space::PARAM};
        }
    }

    std::unique_ptr<Kernel> kernel(const std::vector<Variable>& of_module) {
        for (const auto* variables : {&of_module, &text_.variables}) {
            for (const Variable& one : *variables) {
                if (one.space == Space::GLOBAL) continue;
                if (one.dynamic) {
                    kernel_->dynamic_align = std::max(kernel_->dynamic_align, one.align);
                    kernel_->dynamic_constant = constant_slot_of_dynamic(one.name);
                } else if (one.space == Space::SHARED) {
                    const uint64_t offset = placed(kernel_->shared_bytes, one);
                    addresses_[one.name] = {kSharedFirst + offset, Space::SHARED};
                } else {
                    addresses_[one.name] = {placed(kernel_->local_bytes, one), Space::LOCAL};
                }
            }
        }
        for (const Statement& statement : text_.statements) {
            try {
                kernel_->code.push_back(instruction(statement));
            } catch (const Error& error) {
                throw Error(text_.name + ", line " + std::to_string(statement.line) + " (" +
                            statement.text.substr(0, 200) + "): " + error.what());
            }
        }
        static const Statement last{0, -1, false, "ret", {}, "the end"};
        kernel_->code.push_back({});
        kernel_->code.back().run = end;
        kernel_->code.back().statement = &last;
        kernel_->slots = static_cast<int>(text_.registers.size() + kernel_->constants.size());
        return std::move(kernel_);
    }

private:
    const KernelText& text_;
    const std::map<std::string, uint64_t>& globals_;
    std::unique_ptr<Kernel> kernel_;
    std::map<std::string, std::pair<uint64_t, Space>> addresses_;
    std::map<std::string, int> dynamic_;
    std::map<uint64_t, int> constants_;
    // Of the statement that is made:
    const Statement* statement_ = nullptr;
    std::vector<std::string> parts_;  // of its opcode, without those that were taken
    Instruction made_;

    static uint64_t placed(uint64_t& bytes, const Variable& variable) {
        const uint64_t offset = (bytes + variable.align - 1) / variable.align * variable.align;
        bytes = offset + variable.bytes;
        return offset;
    }

    int new_constant(uint64_t value) {
        kernel_->constants.push_back(value);
        return static_cast<int>(text_.registers.size() + kernel_->constants.size() - 1);
    }
    int constant(uint64_t value) {
        const auto known = constants_.find(value);
        return known != constants_.end() ? known->second : constants_[value] = new_constant(value);
    }
    int constant_slot_of_dynamic(const std::string& name) {
        if (kernel_->dynamic_constant < 0) kernel_->dynamic_constant = new_constant(0);
        return dynamic_[name] = kernel_->dynamic_constant;
    }

    // Takes a part of the opcode, if it is there.
    bool take(const std::string& part) {
        const auto place = std::find(parts_.begin(), parts_.end(), part);
        if (place == parts_.end()) return false;
        parts_.erase(place);
        return true;
    }
    void need(const std::string& part) {
        if (!take(part)) throw Error("expected ." + part);
    }
    template <class T>
    bool take_one(const std::map<std::string, T>& names, T& found) {
        for (const auto& [name, value] : names)
            if (take(name)) return found = value, true;
        return false;
    }
    std::string take_first() {
        if (parts_.empty()) throw Error("a part of the opcode is missing");
        const std::string part = parts_.front();
        parts_.erase(parts_.begin());
        return part;
    }
    Type take_type() {
        const std::string part = take_first();
        if (part == "pred") return {'p', 1};
        if (part == "bf16") return {'h', 16};
        if (part == "bf16x2") return {'h', 32};
        const bool type = part.find_first_not_of("0123456789", 1) == std::string::npos;
        if (!type || part.size() < 2 || part.size() > 3 || !std::strchr("usfb", part[0]))
            throw Error("unknown modifier ." + part);
        const int bits = std::stoi(part.substr(1));
        const bool known =
            bits == 32 || bits == 64 || (part[0] != 'f' && (bits == 8 || bits == 16));
        if (!known) throw Error("unknown type ." + part);
        return {part[0], bits};
    }
    // Additions and multiplications of floats without it may be fused.
    void need_rounding(Type type, bool there) const {
        if (type.kind == 'f' && !there) throw Error("expected .rn, .rz, .rm or .rp");
    }
    bool take_rounding() {
        const std::map<std::string, int> modes = {
            {"rn", FE_TONEAREST}, {"rz", FE_TOWARDZERO}, {"rm", FE_DOWNWARD}, {"rp", FE_UPWARD}};
        return take_one(modes, made_.rounding);
    }
    Space take_space() {
        Space space = Space::GENERIC;
        take_one<Space>({{"global", Space::GLOBAL},
                         {"shared", Space::SHARED},
                         {"local", Space::LOCAL},
                         {"param", Space::PARAM},
                         {"shared::cta", Space::SHARED}},
                        space);
        return space;
    }

    const Operand& operand(size_t number) const {
        if (number >= statement_->operands.size()) throw Error("an operand is missing");
        return statement_->operands[number];
    }
    size_t operands() const { return statement_->operands.size(); }
    void need_operands(size_t least, size_t most) const {
        if (operands() < least || operands() > most) throw Error("another number of operands");
    }

    // A register of exactly that many bits; `wider`: or more.
    int slot(const Operand& given, int bits, bool wider = false) const {
        const Register& found = text_.registers[given.slot];
        if (found.bits != bits && !(wider && found.bits > bits && bits > 1))
            throw Error(found.name + " has " + std::to_string(found.bits) + " bits, not " +
                        std::to_string(bits));
        return given.slot;
    }
    int in(const Operand& given, int bits, bool wider = false) {
        if (given.kind == Operand::REGISTER) {
            made_.reads.push_back(slot(given, bits, wider));
            return given.slot;
        }
        if (given.kind == Operand::NUMBER)
            return constant(bits >= 64 ? given.number : given.number & ((1ull << bits) - 1));
        if (given.kind == Operand::SYMBOL) return symbol(given.symbol).first;
        throw Error("expected a register or a number");
    }
    int in(size_t number, int bits, bool wider = false) {
        const Operand& given = operand(number);
        if (given.negated) throw Error("a negated operand");
        return in(given, bits, wider);
    }
    // A predicate; whether it is negated.
    int predicate(size_t number, bool& negated) {
        negated = operand(number).negated;
        return in(operand(number), 1);
    }
    int out(const Operand& given, int bits, bool wider = false) {
        if (given.kind == Operand::SINK) return -1;
        if (given.kind != Operand::REGISTER || given.slot < SPECIALS)
            throw Error("expected a register");
        made_.writes.push_back(slot(given, bits, wider));
        return given.slot;
    }
    void result(int bits, bool wider = false) { made_.d = out(operand(0), bits, wider); }

    // (slot of a constant with the address, space)
    std::pair<int, Space> symbol(const std::string& name) {
        if (const auto found = dynamic_.find(name); found != dynamic_.end())
            return {found->second, Space::SHARED};
        if (const auto found = addresses_.find(name); found != addresses_.end())
            return {constant(found->second.first), found->second.second};
        if (const auto found = globals_.find(name); found != globals_.end())
            return {constant(found->second), Space::GLOBAL};
        throw Error("unknown symbol " + name);
    }
    // Slot of an address; its offset becomes `number`.
    int address(size_t number) {
        const Operand& given = operand(number);
        if (given.kind != Operand::ADDRESS) throw Error("expected an address");
        made_.number = given.number;
        if (!given.symbol.empty()) return symbol(given.symbol).first;
        if (given.slot < 0) throw Error("an address without a base");
        const int bits = text_.registers[given.slot].bits;
        if (bits != 64 && !(bits == 32 && made_.space == Space::SHARED))
            throw Error("an address of " + std::to_string(bits) + " bits");
        made_.reads.push_back(given.slot);
        return given.slot;
    }
    std::vector<const Operand*> vector(const Operand& given) const {
        std::vector<const Operand*> parts;
        if (given.kind != Operand::VECTOR) return {&given};
        for (const Operand& part : given.parts) parts.push_back(&part);
        return parts;
    }
    std::vector<int> vector_in(size_t number, int bits, bool wider = false) {
        std::vector<int> slots;
        for (const Operand* part : vector(operand(number))) slots.push_back(in(*part, bits, wider));
        return slots;
    }
    std::vector<int> vector_out(size_t number, int bits, bool wider = false) {
        std::vector<int> slots;
        for (const Operand* part : vector(operand(number)))
            slots.push_back(out(*part, bits, wider));
        return slots;
    }

    using Make = void (Decoder::*)();
    static const std::map<std::string, Make>& makers();

    Instruction instruction(const Statement& statement) {
        statement_ = &statement;
        made_ = {};
        made_.statement = &statement, made_.guard = statement.guard,
        made_.negated = statement.negated;
        made_.rounding = FE_TONEAREST;
        parts_ = split(statement.opcode, '.');
        const std::string name = take_first();
        const auto maker = makers().find(name);
        if (maker == makers().end()) throw Error("unknown instruction " + name);
        (this->*maker->second)();
        if (!parts_.empty()) throw Error("unknown modifier ." + parts_.front() + " of " + name);
        return made_;
    }

    // Arithmetic of one type.
    template <class F>
    void of_one(Type type) {
        need_operands(2, 2), result(type.bits);
        made_.a = in(1, type.bits);
        made_.run = with_number(type, [](auto x) -> Run { return unary<F, decltype(x)>; });
    }
    template <class F>
    void of_two(Type type) {
        need_operands(3, 3), result(type.bits);
        made_.a = in(1, type.bits), made_.b = in(2, type.bits);
        made_.run = with_number(type, [](auto x) -> Run { return binary<F, decltype(x)>; });
    }
    template <class F>
    void of_two_integers() {
        const Type type = take_type();
        const Type same = {type.kind == 's' ? 's' : 'u', type.bits};
        if (type.kind == 'f' || type.bits == 8) throw Error("an unknown type");
        need_operands(3, 3), result(type.bits);
        made_.a = in(1, type.bits), made_.b = in(2, type.bits);
        made_.run = type.kind == 'p'
                        ? static_cast<Run>(binary<F, uint32_t>)
                        : with_integer(same, [](auto x) -> Run { return binary<F, decltype(x)>; });
    }
    template <class F>
    void with_rounding() {
        const bool rounds = take_rounding();
        const Type type = take_type();
        need_rounding(type, rounds), of_two<F>(type);
    }
    template <class F, class High>
    void multiply(bool add) {
        const bool rounds = take_rounding();
        const bool low = take("lo"), high = take("hi"), wide = take("wide");
        const Type type = take_type();
        if ((type.kind == 'f') == (low || high || wide))
            throw Error("expected .lo, .hi or .wide of integers");
        need_rounding(type, rounds);
        const int bits = wide ? 2 * type.bits : type.bits;
        need_operands(3 + add, 3 + add), result(bits);
        made_.a = in(1, type.bits), made_.b = in(2, type.bits);
        if (add) made_.c = in(3, bits);
        if (wide) {
            const bool with_sign = type.kind == 's';
            made_.run = type.bits == 16 ? with_sign ? multiply_wide<int16_t, int32_t>
                                                    : multiply_wide<uint16_t, uint32_t>
                        : with_sign ? multiply_wide<int32_t, int64_t>
                                        : multiply_wide<uint32_t, uint64_t>;
        } else if (type.kind == 'f') {
            if (add) throw Error("mad of floats");
            made_.run =
                with_float(type, [](auto x) -> Run { return binary<Multiply, decltype(x)>; });
        } else {
            made_.run = with_integer(type, [&](auto x) -> Run {
                using T = decltype(x);
                if (add) return high ? ternary<MultiplyHighAdd, T> : ternary<MultiplyAdd, T>;
                return high ? binary<MultiplyHigh, T> : binary<Multiply, T>;
            });
        }
    }
    void mul() { multiply<Multiply, MultiplyHigh>(false); }
    void mad() { multiply<MultiplyAdd, MultiplyHighAdd>(true); }
    void fma() {
        const bool rounds = take_rounding();
        const Type type = take_type();
        need_rounding(type, rounds);
        need_operands(4, 4), result(type.bits);
        made_.a = in(1, type.bits), made_.b = in(2, type.bits), made_.c = in(3, type.bits);
        if (type.kind != 'f') throw Error("fma of integers");
        made_.run =
            with_float(type, [](auto x) -> Run { return ternary<FusedMultiplyAdd, decltype(x)>; });
    }
    void rem() { of_two_integers<Remainder>(); }
    template <class F>
    void extreme() {
        const bool nan = take("NaN");
        const Type type = take_type();
        of_two<F>(type);
        if (!nan) return;
        if (type.kind != 'f') throw Error(".NaN of integers");
        made_.run = with_float(type, [](auto x) -> Run { return binary<OrNaN<F>, decltype(x)>; });
    }
    template <class F>
    void of_one_number() {
        of_one<F>(take_type());
    }
    template <class F>
    void rounded_root() {
        const bool rounds = take_rounding();
        const Type type = take_type();
        if (type.kind != 'f') throw Error("of integers");
        need_rounding(type, rounds);
        need_operands(2, 2), result(type.bits), made_.a = in(1, type.bits);
        made_.run = with_float(type, [](auto x) -> Run { return unary<F, decltype(x)>; });
    }
    void inverse() {
        const Type type = take_type();
        need_operands(2, 2), result(type.bits), made_.a = in(1, type.bits);
        made_.run =
            type.kind == 'p' ? negate_predicate : with_integer({'u', type.bits}, [](auto x) -> Run {
                return unary<Not, decltype(x)>;
            });
    }
    template <class F>
    void shift_by() {
        const Type type = take_type();
        need_operands(3, 3), result(type.bits);
        made_.a = in(1, type.bits), made_.b = in(2, 32);
        made_.run = with_integer(type, [](auto x) -> Run { return shift<F, decltype(x)>; });
    }
    void lop3() {
        need("b32"), need_operands(5, 5), result(32);
        made_.a = in(1, 32), made_.b = in(2, 32), made_.c = in(3, 32);
        made_.number = operand(4).number, made_.run = logic;
    }
    void prmt() {
        need("b32"), need_operands(4, 4), result(32);
        made_.a = in(1, 32), made_.b = in(2, 32), made_.c = in(3, 32), made_.run = permute;
    }
    void bfi() {
        const Type type = take_type();
        need_operands(5, 5), result(type.bits);
        made_.a = in(1, type.bits), made_.b = in(2, type.bits), made_.c = in(3, 32),
        made_.e = in(4, 32);
        made_.run = type.bits == 32 ? insert_bits<uint32_t> : insert_bits<uint64_t>;
    }
    void bfe() {
        const Type type = take_type();
        need_operands(4, 4), result(type.bits);
        made_.a = in(1, type.bits), made_.b = in(2, 32), made_.c = in(3, 32);
        made_.run = with_integer(type, [](auto x) -> Run { return extract_bits<decltype(x)>; });
    }
    void dp2a() {
        need("lo"), need("u32"), need("u32"), need_operands(4, 4), result(32);
        made_.a = in(1, 32), made_.b = in(2, 32), made_.c = in(3, 32), made_.run = dot_halves;
    }
    void dp4a() {
        need("s32"), need("s32"), need_operands(4, 4), result(32);
        made_.a = in(1, 32), made_.b = in(2, 32), made_.c = in(3, 32), made_.run = dot;
    }

    void setp() {
        const std::string how = take_first();
        take_one<Modifier>({{"and", Modifier::AND}, {"or", Modifier::OR}, {"xor", Modifier::XOR}},
                           made_.modifier);
        const bool joined = made_.modifier != Modifier::NONE;
        const Type type = take_type();
        need_operands(3 + joined, 3 + joined), result(1);
        if (operand(0).predicate >= 0) throw Error("a second result");
        made_.a = in(1, type.bits), made_.b = in(2, type.bits);
        if (joined) made_.c = predicate(3, made_.flag);
        made_.run = comparison(how, type);
    }
    Run comparison(const std::string& how, Type type) {
        if (how == "eq") return comparison<Compare::EQ>(type);
        if (how == "ne") return comparison<Compare::NE>(type);
        if (how == "lt" || (how == "lo" && type.kind == 'u')) return comparison<Compare::LT>(type);
        if (how == "le" || (how == "ls" && type.kind == 'u')) return comparison<Compare::LE>(type);
        if (how == "gt" || (how == "hi" && type.kind == 'u')) return comparison<Compare::GT>(type);
        if (how == "ge" || (how == "hs" && type.kind == 'u')) return comparison<Compare::GE>(type);
        if (type.kind == 'f') {
            if (how == "equ") return comparison<Compare::EQU>(type);
            if (how == "neu") return comparison<Compare::NEU>(type);
            if (how == "ltu") return comparison<Compare::LTU>(type);
            if (how == "leu") return comparison<Compare::LEU>(type);
            if (how == "gtu") return comparison<Compare::GTU>(type);
            if (how == "geu") return comparison<Compare::GEU>(type);
            if (how == "num") return comparison<Compare::NUM>(type);
            if (how == "nan") return comparison<Compare::NAN_>(type);
        }
        throw Error("unknown comparison ." + how);
    }
    template <Compare HOW>
    Run comparison(Type type) {
        return with_number(type, [](auto x) -> Run { return compare<Compared<HOW>, decltype(x)>; });
    }
    void selp() {
        const Type type = take_type();
        need_operands(4, 4), result(type.bits);
        made_.a = in(1, type.bits), made_.b = in(2, type.bits), made_.reads.clear();
        made_.c = in(3, 1);
        made_.copies = true, made_.run = select;
    }

    void mov() {
        const Type type = take_type();
        need_operands(2, 2);
        const Operand &to = operand(0), &from = operand(1);
        if (from.kind == Operand::VECTOR) {
            result(type.bits);
            made_.bits = type.bits / static_cast<int>(from.parts.size());
            made_.as = vector_in(1, made_.bits), made_.run = pack;
        } else if (to.kind == Operand::VECTOR) {
            made_.bits = type.bits / static_cast<int>(to.parts.size());
            made_.ds = vector_out(0, made_.bits), made_.a = in(1, type.bits), made_.run = unpack;
        } else {
            result(type.bits), made_.a = in(1, type.bits), made_.reads.clear();
            made_.copies = true, made_.run = move;
        }
    }
    void cvt() {
        const std::map<std::string, int> to_whole = {{"rni", FE_TONEAREST},
                                                     {"rzi", FE_TOWARDZERO},
                                                     {"rmi", FE_DOWNWARD},
                                                     {"rpi", FE_UPWARD}};
        const bool rounds = take_one(to_whole, made_.rounding);
        made_.flag = rounds;
        if (!rounds) take_rounding();
        const Type to = take_type(), from = take_type();
        if (to.kind == 'h') return cvt_to_bfloat16(to, from);
        need_operands(2, 2);
        result(to.bits, to.kind != 'f'), made_.a = in(1, from.bits, from.kind != 'f');
        made_.bits = text_.registers[operand(0).slot].bits;
        if (from.kind == 'h') {
            if (to.kind != 'f' || to.bits != 32 || from.bits != 16)
                throw Error("an unknown conversion");
            made_.run = convert_of_bfloat16;
            return;
        }
        if (from.kind == 'f' && to.kind != 'f' && !rounds)
            throw Error("a conversion that rounds nowhere");
        made_.run = with_number(to, [&](auto wanted) -> Run {
            return with_number(from, [&](auto given) -> Run {
                return convert<decltype(wanted), decltype(given)>;
            });
        });
    }
    void cvt_to_bfloat16(Type to, Type from) {
        const bool two = to.bits == 32;
        if (from.kind != 'f' || from.bits != 32 ||
            (made_.rounding != FE_TONEAREST && made_.rounding != FE_TOWARDZERO))
            throw Error("an unknown conversion");
        need_operands(2 + two, 2 + two), result(to.bits), made_.a = in(1, 32);
        if (two) made_.b = in(2, 32);
        made_.run = two ? convert_to_two_bfloat16 : convert_to_bfloat16;
    }
    void cvta() {
        const bool to = take("to");
        const Space space = take_space();
        need("u64"), need_operands(2, 2), result(64), made_.a = in(1, 64);
        made_.number = space == Space::SHARED  ? kSharedWindow
                       : space == Space::LOCAL ? kLocalWindow
                                               : 0;
        made_.run = to ? from_generic : to_generic;
    }

    // [.space] [.nc] [.vN] .type
    Type memory_type(size_t& count) {
        made_.space = take_space();
        take("nc");
        count = take("v4") ? 4 : take("v2") ? 2 : 1;
        Type type = take_type();
        if (type.kind == 'f' || type.kind == 'b') type.kind = 'u';
        if (type.kind != 'u' && type.kind != 's') throw Error("an unknown type");
        return type;
    }
    void ld() {
        size_t count;
        const Type type = memory_type(count);
        need_operands(2, 2);
        made_.ds = vector_out(0, type.bits, true), made_.a = address(1);
        for (const Operand* part : vector(operand(0)))
            if (part->slot >= 0) made_.bits = text_.registers[part->slot].bits;
        if (made_.ds.size() != count) throw Error("another number of registers");
        made_.run = with_integer(type, [](auto x) -> Run { return load<decltype(x)>; });
    }
    void st() {
        size_t count;
        const Type type = memory_type(count);
        need_operands(2, 2);
        made_.a = address(0), made_.as = vector_in(1, type.bits, true);
        if (made_.as.size() != count) throw Error("another number of registers");
        made_.run = with_integer(type, [](auto x) -> Run { return store<decltype(x)>; });
    }
    void atom() {
        made_.space = take_space();
        take_one<Modifier>({{"add", Modifier::ADD},
                            {"min", Modifier::MIN},
                            {"max", Modifier::MAX},
                            {"and", Modifier::AND},
                            {"or", Modifier::OR},
                            {"xor", Modifier::XOR},
                            {"exch", Modifier::EXCHANGE},
                            {"cas", Modifier::COMPARE_AND_SWAP}},
                           made_.modifier);
        if (made_.modifier == Modifier::NONE) throw Error("an unknown update");
        const Type type = take_type();
        const bool swap = made_.modifier == Modifier::COMPARE_AND_SWAP;
        need_operands(3 + swap, 3 + swap), result(type.bits);
        made_.a = address(1), made_.b = in(2, type.bits);
        if (swap) made_.c = in(3, type.bits);
        made_.run = with_number(type, [](auto x) -> Run { return update<decltype(x)>; });
    }

    void bra() {
        take("uni"), need_operands(1, 1);
        const auto label = text_.labels.find(operand(0).symbol);
        if (label == text_.labels.end()) throw Error("unknown label");
        made_.number = label->second, made_.run = branch;
    }
    void ret() { need_operands(0, 0), made_.run = end; }
    void membar() {
        need("gl");
        made_.run = fence_memory;
    }
    // Launches run one after another.
    void griddepcontrol() {
        if (!take("wait")) need("launch_dependents");
        made_.run = [](Thread&, const Instruction&) {};
    }
    // Registers have no limit here.
    void setmaxnreg() {
        if (!take("inc")) need("dec");
        need("sync"), need("aligned"), need("u32"), need_operands(1, 1);
        made_.run = [](Thread&, const Instruction&) {};
    }
    void fence() {
        if (take("proxy")) {
            need("async");
            if (take_space() != Space::SHARED) throw Error("expected .shared::cta");
            kernel_->fences = true;
            made_.run = fence_proxy;
            return;
        }
        if (!take("acq_rel")) need("sc");
        need("gpu");
        made_.run = fence_memory;
    }

    void collective(Perform perform, bool aligned) {
        made_.run = with_warp, made_.perform = perform, made_.aligned = aligned;
    }
    void shfl() {
        need("sync"), need("b32"), need_operands(5, 5), result(32);
        if (!take_one<Modifier>({{"up", Modifier::UP},
                                 {"down", Modifier::DOWN},
                                 {"bfly", Modifier::BUTTERFLY},
                                 {"idx", Modifier::INDEX}},
                                made_.modifier))
            throw Error("an unknown shuffle");
        if (operand(0).predicate >= 0) {
            made_.predicate = operand(0).predicate;
            made_.writes.push_back(made_.predicate);
        }
        made_.a = in(1, 32), made_.b = in(2, 32), made_.c = in(3, 32), made_.e = in(4, 32);
        collective(perform_shuffle, false);
    }
    void vote() {
        need("sync"), need_operands(3, 3);
        if (!take_one<Modifier>({{"any", Modifier::ANY},
                                 {"all", Modifier::ALL},
                                 {"ballot", Modifier::BALLOT},
                                 {"uni", Modifier::UNIFORM}},
                                made_.modifier))
            throw Error("an unknown vote");
        const bool ballot = made_.modifier == Modifier::BALLOT;
        need(ballot ? "b32" : "pred"), result(ballot ? 32 : 1);
        made_.a = predicate(1, made_.flag), made_.e = in(2, 32);
        collective(perform_vote, false);
    }

    // bar.sync, bar.arrive, bar.warp.sync
    void bar() {
        if (take("warp")) {
            need("sync"), need_operands(1, 1), made_.e = in(0, 32);
            return collective(perform_warp_barrier, false);
        }
        barrier(true);
    }
    void barrier_of_block() { barrier(take("aligned")); }
    void barrier(bool aligned) {
        made_.flag = take("arrive");
        if (!made_.flag) need("sync");
        need_operands(1 + made_.flag, 2), made_.a = in(0, 32);
        if (operands() == 2) made_.b = in(1, 32);
        made_.aligned = aligned, made_.run = with_block;
        // A lane that does not wait must not run on before the others have come.
        if (made_.flag && aligned) collective(perform_arrival, true);
    }

    const std::vector<int>& table(const std::string& name) const {
        const auto found = kernel_->tables->find(name);
        if (found == kernel_->tables->end()) throw Error("no layout " + name);
        return found->second;
    }
    void sizes(const std::string& shape) {
        if (std::sscanf(shape.c_str(), "m%dn%dk%d", &made_.m, &made_.n, &made_.k) != 3)
            throw Error("an unknown shape ." + shape);
    }
    void ldmatrix() {
        need("sync"), need("aligned"), need("m8n8"), need("b16"), need_operands(2, 2);
        std::string name = "ldmatrix";
        const int count = take("x4") ? 4 : take("x2") ? 2 : (need("x1"), 1);
        name += ".x" + std::to_string(count) + (take("trans") ? ".trans" : "");
        made_.space = take_space();
        if (made_.space != Space::SHARED) throw Error("expected .shared");
        made_.ds = vector_out(0, 32), made_.a = address(1);
        if (static_cast<int>(made_.ds.size()) != count) throw Error("another number of registers");
        made_.layouts[0] = &table(name);
        collective(perform_matrix_load, true);
    }
    // Operands whose values have `bits` bits, and sums of 32 bits.
    void fragments(const std::string& name, int bits) {
        made_.bits = bits, made_.ds = vector_out(0, 32), made_.as = vector_in(1, 32);
        made_.bs = vector_in(2, 32), made_.cs = vector_in(3, 32);
        made_.layouts[0] = &table(name + " A"), made_.layouts[1] = &table(name + " B");
        made_.layouts[2] = &table(name + " C");
        const auto fits = [this](const std::vector<int>& slots, int layout, int each) {
            return slots.size() * 32 == made_.layouts[layout]->size() / kWarp * each;
        };
        if (!fits(made_.as, 0, bits) || !fits(made_.bs, 1, bits) || !fits(made_.cs, 2, 32) ||
            !fits(made_.ds, 2, 32))
            throw Error("another number of registers than the fragments have");
    }
    void mma() {
        const bool sparse = take("sp::ordered_metadata");
        need("sync"), need("aligned");
        const std::string shape = take_first();
        sizes(shape);
        need("row"), need("col");
        const std::string sum = take_first(), a = take_first(), b = take_first(), c = take_first();
        if (a != b || sum != c) throw Error("operands of different types");
        const std::string types = sum + "." + a;
        need_operands(4 + 2 * sparse, 4 + 2 * sparse);
        if (sparse) {
            if (types != "s32.s8" || operand(5).number) throw Error("an unknown sparse product");
            fragments("mma.sp." + shape + ".s8", 8);
            made_.metadata = in(4, 32);
            return collective(perform_sparse_product, true);
        }
        if (types == "s32.s8") {
            fragments("mma." + shape + ".s8", 8);
            return collective(perform_integer_product, true);
        }
        if (types == "s32.b1") {
            need("and"), need("popc");
            fragments("mma." + shape + ".b1", 1);
            return collective(perform_integer_product, true);
        }
        if (types == "f32.bf16") {
            fragments("mma." + shape + ".bf16", 16);
            return collective(perform_float_product, true);
        }
        throw Error("unknown types of a product: " + types);
    }
    void wgmma() {
        const std::string what = take_first();
        need("sync"), need("aligned");
        if (what == "fence") return need_operands(0, 0), collective(perform_warpgroup_fence, true);
        if (what == "commit_group")
            return need_operands(0, 0), collective(perform_warpgroup_commit, true);
        if (what == "wait_group") {
            need_operands(1, 1), made_.number = operand(0).number;
            return collective(perform_warpgroup_wait, true);
        }
        if (what != "mma_async") throw Error("unknown modifier ." + what);
        const std::string shape = take_first();
        sizes(shape);
        need("s32"), need("s8"), need("s8"), need_operands(4, 4);
        made_.ds = vector_out(0, 32), made_.writes.clear();  // they are in flight
        made_.a = in(1, 64), made_.b = in(2, 64);
        bool negated;
        made_.c = predicate(3, negated);
        if (negated) throw Error("a negated operand");
        made_.layouts[2] = &table("wgmma." + shape + ".s8 C");
        if (made_.ds.size() != made_.layouts[2]->size() / kWarpgroup)
            throw Error("another number of registers");
        collective(perform_warpgroup_product, true);
    }
    void cp() {
        need("async");
        if (take("commit_group")) return need_operands(0, 0), made_.run = commit_copies, void();
        if (take("wait_all")) return need_operands(0, 0), made_.run = wait_all_copies, void();
        if (take("wait_group")) {
            need_operands(1, 1), made_.number = operand(0).number, made_.run = wait_copies;
            return;
        }
        const bool past_l1 = take("cg");
        if (!past_l1) need("ca");
        need("shared"), need("global"), need_operands(3, 4);
        made_.bytes = static_cast<int>(operand(2).number);
        const bool known =
            made_.bytes == 16 || (!past_l1 && (made_.bytes == 4 || made_.bytes == 8));
        if (!known) throw Error("an unknown number of bytes");
        if (operand(1).number) throw Error("an offset of the source");
        made_.space = Space::GLOBAL, made_.a = address(1);
        made_.space = Space::SHARED, made_.d = address(0);
        if (operands() == 4) made_.b = in(3, 32);
        made_.run = copy_async;
    }
};

const std::map<std::string, Decoder::Make>& Decoder::makers() {
    static const std::map<std::string, Make> found = {
        {"abs", &Decoder::of_one_number<Absolute>},
        {"add", &Decoder::with_rounding<Add>},
        {"and", &Decoder::of_two_integers<And>},
        {"atom", &Decoder::atom},
        {"bar", &Decoder::bar},
        {"barrier", &Decoder::barrier_of_block},
        {"bfe", &Decoder::bfe},
        {"bfi", &Decoder::bfi},
        {"bra", &Decoder::bra},
        {"cp", &Decoder::cp},
        {"cvt", &Decoder::cvt},
        {"cvta", &Decoder::cvta},
        {"div", &Decoder::with_rounding<Divide>},
        {"dp2a", &Decoder::dp2a},
        {"dp4a", &Decoder::dp4a},
        {"fence", &Decoder::fence},
        {"fma", &Decoder::fma},
        {"griddepcontrol", &Decoder::griddepcontrol},
        {"ld", &Decoder::ld},
        {"ldmatrix", &Decoder::ldmatrix},
        {"lop3", &Decoder::lop3},
        {"mad", &Decoder::mad},
        {"max", &Decoder::extreme<Maximum>},
        {"membar", &Decoder::membar},
        {"min", &Decoder::extreme<Minimum>},
        {"mma", &Decoder::mma},
        {"mov", &Decoder::mov},
        {"mul", &Decoder::mul},
        {"neg", &Decoder::of_one_number<Negate>},
        {"not", &Decoder::inverse},
        {"or", &Decoder::of_two_integers<Or>},
        {"prmt", &Decoder::prmt},
        {"rcp", &Decoder::rounded_root<Reciprocal>},
        {"rem", &Decoder::rem},
        {"ret", &Decoder::ret},
        {"selp", &Decoder::selp},
        {"setmaxnreg", &Decoder::setmaxnreg},
        {"setp", &Decoder::setp},
        {"shfl", &Decoder::shfl},
        {"shl", &Decoder::shift_by<ShiftLeft>},
        {"shr", &Decoder::shift_by<ShiftRight>},
        {"sqrt", &Decoder::rounded_root<SquareRoot>},
        {"st", &Decoder::st},
        {"sub", &Decoder::with_rounding<Subtract>},
        {"vote", &Decoder::vote},
        {"wgmma", &Decoder::wgmma},
        {"xor", &Decoder::of_two_integers<Xor>},
    };
    return found;
}

}  // namespace

std::unique_ptr<Kernel> decode(const KernelText& text, const std::vector<Variable>& of_module,
                               const std::map<std::string, uint64_t>& globals,
                               const Tables& tables) {
    return Decoder(text, globals, tables).kernel(of_module);
}

}  // namespace ptx
