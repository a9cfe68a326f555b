//! The calls between the files of the library, and the files that hold the methods of its types.
//!
//! The sources are parsed, and the target of a call is found by the types that are written down: of
//! `self`, of fields, of parameters, and of values that a function of the crate returns. If the type
//! of a receiver is not known, a method counts if its name occurs once in the crate, and its type is
//! imported or in the same folder. Calls through traits are left out, because their target depends on
//! the value.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{
    Attribute, Expr, FnArg, GenericArgument, ImplItem, Item, Pat, PathArguments, ReturnType, Token, Type, UseTree,
};

use crate::{ROOT, collect};

/// Types that dereference to their last type argument.
const POINTERS: [&str; 5] = ["Arc", "Box", "MutexGuard", "Pin", "Rc"];

/// A type, with the file that defines it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TypeName {
    pub(crate) file: String,
    pub(crate) name: String,
}

struct Function {
    file: String,
    returns: Option<TypeName>,
}

/// Calls from one file to another, each written as `line: function`, by the two files.
pub(crate) type Calls = BTreeMap<(String, String), BTreeSet<String>>;

/// The items of the crate.
#[derive(Default)]
pub(crate) struct Sources {
    files: Vec<(String, syn::File)>,
    /// The names that each file imports.
    imports: BTreeMap<String, Imports>,
    /// The fields of each type, by its name and its file.
    types: BTreeMap<String, BTreeMap<String, BTreeMap<String, Type>>>,
    /// The inherent methods, by their name and their type.
    methods: BTreeMap<String, BTreeMap<TypeName, Function>>,
    trait_methods: BTreeSet<String>,
    /// The files of each free function.
    functions: BTreeMap<String, Vec<String>>,
}

impl Sources {
    /// Parses the library, without its tests.
    pub(crate) fn of_library() -> Self {
        let src = Path::new(ROOT).join("src");
        let mut files = Vec::new();
        collect(&src, &mut files);
        let is_test = |file: &Path| ["tests.rs", "loom.rs"].iter().any(|name| file.ends_with(name));
        let texts = files.into_iter().filter(|file| !is_test(file)).map(|file| {
            let name = file.strip_prefix(&src).unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read_to_string(file).unwrap())
        });
        Self::parse(texts)
    }

    fn parse(texts: impl IntoIterator<Item = (String, String)>) -> Self {
        let parsed = |(name, text): (String, String)| {
            let file = syn::parse_file(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
            (name, file)
        };
        let mut sources = Self { files: texts.into_iter().map(parsed).collect(), ..Self::default() };
        let files = std::mem::take(&mut sources.files);
        for (file, parsed) in &files {
            sources.imports.insert(file.clone(), Imports::of(parsed));
            sources.add_types(file, &parsed.items);
        }
        for (file, parsed) in &files {
            sources.add_functions(file, &parsed.items);
        }
        sources.files = files;
        sources
    }

    fn add_types(&mut self, file: &str, items: &[Item]) {
        for item in items.iter().filter(|item| !is_test(item)) {
            let (ident, fields) = match item {
                Item::Struct(item) => (&item.ident, item.fields.iter().collect::<Vec<_>>()),
                Item::Enum(item) => (&item.ident, Vec::new()),
                Item::Mod(module) => {
                    self.add_types(file, module.content.as_ref().map_or(&[], |(_, items)| items));
                    continue;
                }
                _ => continue,
            };
            let name = |(number, field): (usize, &syn::Field)| {
                (field.ident.as_ref().map_or(number.to_string(), ToString::to_string), field.ty.clone())
            };
            let fields = fields.into_iter().enumerate().map(name).collect();
            self.types.entry(ident.to_string()).or_default().insert(file.to_owned(), fields);
        }
    }

    fn add_functions(&mut self, file: &str, items: &[Item]) {
        for item in items.iter().filter(|item| !is_test(item)) {
            match item {
                Item::Fn(item) => self.functions.entry(item.sig.ident.to_string()).or_default().push(file.to_owned()),
                Item::Mod(module) => {
                    self.add_functions(file, module.content.as_ref().map_or(&[], |(_, items)| items));
                }
                Item::Trait(item) => self.trait_methods.extend(item.items.iter().filter_map(|item| match item {
                    syn::TraitItem::Fn(method) => Some(method.sig.ident.to_string()),
                    _ => None,
                })),
                Item::Impl(item) => {
                    let own = self.named(file, None, &item.self_ty);
                    for method in &item.items {
                        let ImplItem::Fn(method) = method else { continue };
                        let name = method.sig.ident.to_string();
                        if item.trait_.is_some() {
                            self.trait_methods.insert(name);
                        } else if let Some(own) = &own {
                            let returns = match &method.sig.output {
                                ReturnType::Type(_, returned) => self.named(file, Some(own), returned),
                                ReturnType::Default => None,
                            };
                            let function = Function { file: file.to_owned(), returns };
                            self.methods.entry(name).or_default().insert(own.clone(), function);
                        }
                    }
                }
                _ => {}
            }
        }
    }

    /// Returns the type of the library behind references and pointers.
    fn named(&self, file: &str, own: Option<&TypeName>, written: &Type) -> Option<TypeName> {
        match written {
            Type::Reference(reference) => self.named(file, own, &reference.elem),
            Type::Path(path) => {
                let last = path.path.segments.last()?;
                let name = last.ident.to_string();
                if name == "Self" {
                    return own.cloned();
                }
                if POINTERS.contains(&&*name)
                    && let PathArguments::AngleBracketed(arguments) = &last.arguments
                {
                    return match arguments.args.last()? {
                        GenericArgument::Type(inner) => self.named(file, own, inner),
                        _ => None,
                    };
                }
                self.type_called(file, &name)
            }
            _ => None,
        }
    }

    /// Returns the type that a file means by a name: its own, or the only one in the crate, or the
    /// only one in its folder.
    fn type_called(&self, file: &str, name: &str) -> Option<TypeName> {
        let files = self.types.get(name)?;
        let imported = self.imports.get(file).and_then(|imports| imports.0.get(name));
        if imported.is_some_and(|import| !["crate", "self", "super"].contains(&&*import.root)) {
            return None;
        }
        let mut near = files.keys().filter(|known| folder(known) == folder(file));
        let found = match (files.len(), near.next(), near.next()) {
            _ if files.contains_key(file) => file,
            (1, ..) => files.keys().next()?,
            (_, Some(only), None) => only,
            _ => return None,
        };
        Some(TypeName { file: found.to_owned(), name: name.to_owned() })
    }

    /// Returns the files with methods of each type.
    pub(crate) fn files_of_types(&self) -> BTreeMap<&TypeName, BTreeSet<&str>> {
        let mut files = BTreeMap::<_, BTreeSet<&str>>::new();
        for (of, method) in self.methods.values().flatten() {
            files.entry(of).or_default().insert(&method.file);
        }
        files
    }

    pub(crate) fn calls(&self) -> Calls {
        let mut calls = Calls::new();
        for (file, parsed) in &self.files {
            let mut caller = Caller {
                sources: self,
                file,
                own: None,
                locals: BTreeMap::new(),
                imports: &self.imports[file],
                calls: &mut calls,
            };
            caller.visit_file(parsed);
        }
        calls
    }
}

/// The first name of the path of an import, and the name before the imported one.
#[derive(Clone)]
struct Import {
    root: String,
    parent: String,
}

/// The imports of a file, by the imported name.
#[derive(Default)]
struct Imports(BTreeMap<String, Import>);

impl Imports {
    fn of(file: &syn::File) -> Self {
        let mut imports = Self::default();
        imports.visit_file(file);
        imports
    }

    fn add(&mut self, before: Option<&Import>, tree: &UseTree) {
        match tree {
            UseTree::Path(path) => {
                let parent = path.ident.to_string();
                let root = before.map_or(&parent, |before| &before.root).clone();
                self.add(Some(&Import { root, parent }), &path.tree);
            }
            UseTree::Name(name) => self.0.extend(before.map(|before| (name.ident.to_string(), before.clone()))),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.add(before, tree)),
            UseTree::Rename(_) | UseTree::Glob(_) => {}
        }
    }
}

impl<'ast> Visit<'ast> for Imports {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.add(None, &item.tree);
    }
}

/// Returns the folder of a file.
fn folder(file: &str) -> &str {
    file.rsplit_once('/').map_or("", |(folder, _)| folder)
}

fn is_test(item: &Item) -> bool {
    let attributes = match item {
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        _ => return false,
    };
    attributes.iter().any(is_test_attribute)
}

fn is_test_attribute(attribute: &Attribute) -> bool {
    let syn::Meta::List(list) = &attribute.meta else { return false };
    let condition = list.tokens.to_string().replace(' ', "");
    list.path.is_ident("cfg") && (condition == "test" || condition.starts_with("all(test,"))
}

/// Finds the calls in a file.
struct Caller<'a> {
    sources: &'a Sources,
    file: &'a str,
    /// The type of `self`.
    own: Option<TypeName>,
    /// The known types of parameters and variables.
    locals: BTreeMap<String, Option<TypeName>>,
    imports: &'a Imports,
    calls: &'a mut Calls,
}

impl Caller<'_> {
    fn add(&mut self, line: usize, to: &str, function: &str) {
        if to != self.file {
            let call = format!("line {line} calls {function}");
            self.calls.entry((self.file.to_owned(), to.to_owned())).or_default().insert(call);
        }
    }

    fn type_of(&self, expression: &Expr) -> Option<TypeName> {
        match expression {
            Expr::Path(path) if path.path.is_ident("self") => self.own.clone(),
            Expr::Path(path) => self.locals.get(&path.path.get_ident()?.to_string())?.clone(),
            Expr::Field(field) => {
                let of = self.type_of(&field.base)?;
                let name = match &field.member {
                    syn::Member::Named(name) => name.to_string(),
                    syn::Member::Unnamed(index) => index.index.to_string(),
                };
                let written = self.sources.types.get(&of.name)?.get(&of.file)?.get(&name)?;
                self.sources.named(&of.file, Some(&of), written)
            }
            Expr::Reference(inner) => self.type_of(&inner.expr),
            Expr::Paren(inner) => self.type_of(&inner.expr),
            Expr::Unary(inner) => self.type_of(&inner.expr),
            Expr::Struct(literal) => self.type_at(&literal.path),
            Expr::MethodCall(call) => self.method(&call.receiver, &call.method.to_string())?.1.returns.clone(),
            Expr::Call(call) => match &*call.func {
                Expr::Path(path) => self.associated(&path.path)?.1.returns.clone(),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns `true` for a field that a type of this file has, with a type of another crate.
    fn is_foreign(&self, receiver: &Expr) -> bool {
        let Expr::Field(syn::ExprField { member: syn::Member::Named(name), .. }) = receiver else { return false };
        let fields = self.sources.types.values().filter_map(|files| files.get(self.file)?.get(&name.to_string()));
        let mut types = fields.map(|written| self.sources.named(self.file, None, written)).peekable();
        types.peek().is_some() && types.all(|of| of.is_none())
    }

    fn type_at(&self, path: &syn::Path) -> Option<TypeName> {
        let name = path.segments.last()?.ident.to_string();
        if name == "Self" { self.own.clone() } else { self.sources.type_called(self.file, &name) }
    }

    /// Returns the method that a call of `name` on a receiver calls.
    fn method(&self, receiver: &Expr, name: &str) -> Option<(String, &Function)> {
        let methods = self.sources.methods.get(name)?;
        let (of, method) = match self.type_of(receiver) {
            Some(of) => methods.get_key_value(&of)?,
            None if self.is_foreign(receiver) || methods.len() > 1 || self.sources.trait_methods.contains(name) => {
                return None;
            }
            None => methods
                .iter()
                .next()
                .filter(|(of, _)| folder(&of.file) == folder(self.file) || self.imports.0.contains_key(&of.name))?,
        };
        Some((format!("{}::{name}", of.name), method))
    }

    /// Returns the function that `Type::name` names.
    fn associated(&self, path: &syn::Path) -> Option<(String, &Function)> {
        let name = path.segments.last()?.ident.to_string();
        let mut of = path.clone();
        of.segments.pop();
        of.segments.pop_punct();
        let of = self.type_at(&of)?;
        let method = self.sources.methods.get(&name)?.get(&of)?;
        Some((format!("{}::{name}", of.name), method))
    }

    /// Returns the file of the function of a module that a path names.
    fn free(&self, path: &syn::Path) -> Option<(String, String)> {
        let name = path.segments.last()?.ident.to_string();
        let parent = match path.segments.len() {
            1 if self.locals.contains_key(&name) => return None,
            1 => self.imports.0.get(&name)?.parent.clone(),
            len => path.segments[len - 2].ident.to_string(),
        };
        let is_in = |file: &&String| {
            let module = file.trim_end_matches(".rs").trim_end_matches("/mod");
            module.ends_with(&parent) || parent == "super" || parent == "crate"
        };
        let files: Vec<_> = self.sources.functions.get(&name)?.iter().filter(is_in).collect();
        match files[..] {
            [only] => Some((name, only.clone())),
            _ => None,
        }
    }

    fn bind(&mut self, pattern: &Pat, of: Option<TypeName>) {
        struct Names(Vec<String>);
        impl<'ast> Visit<'ast> for Names {
            fn visit_pat_ident(&mut self, pattern: &'ast syn::PatIdent) {
                self.0.push(pattern.ident.to_string());
            }
        }
        let mut names = Names(Vec::new());
        names.visit_pat(pattern);
        let of = of.filter(|_| matches!(pattern, Pat::Ident(_)));
        self.locals.extend(names.0.into_iter().map(|name| (name, of.clone())));
    }

    fn in_function(&mut self, signature: &syn::Signature, visit: impl FnOnce(&mut Self)) {
        let outer = std::mem::take(&mut self.locals);
        for argument in &signature.inputs {
            if let FnArg::Typed(argument) = argument {
                let of = self.sources.named(self.file, self.own.as_ref(), &argument.ty);
                self.bind(&argument.pat, of);
            }
        }
        visit(self);
        self.locals = outer;
    }
}

impl<'ast> Visit<'ast> for Caller<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test(item) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let own = self.sources.named(self.file, None, &item.self_ty);
        let outer = std::mem::replace(&mut self.own, own);
        visit::visit_item_impl(self, item);
        self.own = outer;
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !item.attrs.iter().any(is_test_attribute) {
            self.in_function(&item.sig, |caller| visit::visit_impl_item_fn(caller, item));
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.in_function(&item.sig, |caller| visit::visit_item_fn(caller, item));
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        visit::visit_local(self, local);
        match (&local.pat, &local.init) {
            (Pat::Type(typed), _) => {
                let of = self.sources.named(self.file, self.own.as_ref(), &typed.ty);
                self.bind(&typed.pat, of);
            }
            (pattern, Some(init)) => {
                let of = self.type_of(&init.expr);
                self.bind(pattern, of);
            }
            (pattern, None) => self.bind(pattern, None),
        }
    }

    fn visit_expr_closure(&mut self, closure: &'ast syn::ExprClosure) {
        let outer = self.locals.clone();
        for input in &closure.inputs {
            match input {
                Pat::Type(typed) => {
                    let of = self.sources.named(self.file, self.own.as_ref(), &typed.ty);
                    self.bind(&typed.pat, of);
                }
                pattern => self.bind(pattern, None),
            }
        }
        visit::visit_expr_closure(self, closure);
        self.locals = outer;
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if let Some((name, method)) = self.method(&call.receiver, &call.method.to_string()) {
            let to = method.file.clone();
            self.add(call.method.span().start().line, &to, &name);
        }
        visit::visit_expr_method_call(self, call);
    }

    /// Also counts a function that is not called but passed on.
    fn visit_expr_path(&mut self, path: &'ast syn::ExprPath) {
        let called = self.associated(&path.path).map(|(name, method)| (name, method.file.clone()));
        if let Some((name, to)) = called.or_else(|| self.free(&path.path)) {
            let line = path.path.segments[0].ident.span().start().line;
            self.add(line, &to, &name);
        }
        visit::visit_expr_path(self, path);
    }

    /// Reads the arguments of macros such as `format!`.
    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        if let Ok(arguments) = called.parse_body_with(Punctuated::<Expr, Token![,]>::parse_terminated) {
            arguments.iter().for_each(|argument| self.visit_expr(argument));
        }
    }
}

/// Returns the calls that belong to a circle of files.
pub(crate) fn circles(calls: &Calls) -> Vec<(&str, &str)> {
    let mut called = BTreeMap::<_, Vec<&str>>::new();
    for (from, to) in calls.keys() {
        called.entry(from.as_str()).or_default().push(to);
    }
    let mut reached = BTreeMap::new();
    for from in called.keys() {
        let (mut seen, mut next) = (BTreeSet::new(), vec![*from]);
        while let Some(file) = next.pop() {
            next.extend(called.get(file).into_iter().flatten().filter(|file| seen.insert(**file)));
        }
        reached.insert(*from, seen);
    }
    let all = calls.keys().map(|(from, to)| (from.as_str(), to.as_str()));
    all.filter(|(from, to)| reached.get(to).is_some_and(|reached| reached.contains(from))).collect()
}

#[test]
fn calls_are_found_by_the_types_of_receivers() {
    let of_a = "mod b;
        pub struct A { b: Arc<B>, n: u32 }
        impl A {
            fn first(&self) { self.b.second(); }
            fn third(&self) -> B { B::new() }
            fn fourth(&self) {}
        }";
    let of_b = "pub struct B;
        impl B { fn new() -> Self { B } fn second(&self) {} fn fourth(&self) {} }
        fn call(a: &A) {
            a.third().fourth();
            format!(\"{}\", a.fourth());
            unknown().third();
            unknown().fourth();
        }";
    let of_c = "use crate::d::free;
        fn other() { free(); let free = 1; free; }
        fn lone() { [1].map(|first| first) }";
    let of_d = "pub fn free(a: &A) { a.first() }
        #[cfg(test)] mod tests { fn test() { other() } }";
    let files = [("a/mod.rs", of_a), ("a/b.rs", of_b), ("c.rs", of_c), ("d.rs", of_d)];
    let calls = Sources::parse(files.map(|(name, text)| (name.to_owned(), text.to_owned()))).calls();
    let found: Vec<String> = calls
        .iter()
        .flat_map(|((from, to), sites)| sites.iter().map(move |site| format!("{from} -> {to}, {site}")))
        .collect();
    assert_eq!(
        found,
        [
            "a/b.rs -> a/mod.rs, line 4 calls A::third",
            "a/b.rs -> a/mod.rs, line 5 calls A::fourth",
            "a/b.rs -> a/mod.rs, line 6 calls A::third",
            "a/mod.rs -> a/b.rs, line 4 calls B::second",
            "a/mod.rs -> a/b.rs, line 5 calls B::new",
            "c.rs -> d.rs, line 2 calls free",
            "d.rs -> a/mod.rs, line 1 calls A::first",
        ]
    );
    assert_eq!(circles(&calls), [("a/b.rs", "a/mod.rs"), ("a/mod.rs", "a/b.rs")]);
}
